"""transformers' continuous batching, which `generate_batch` is; its manager itself, since that takes a length each."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.engines.protocol import Engine, TokenIds, serve

# Room for the whole load, as 160 blocks of 256 tokens.
NUM_BLOCKS, BATCH = 160, 512


def load(model: Path, dtype: str) -> Engine:
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
    # A prompt that comes again in the next round must be computed again.
    batching = ContinuousBatchingConfig(num_blocks=NUM_BLOCKS, max_batch_tokens=BATCH, allow_block_sharing=False)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)

    def generate(prompts: Sequence[list[int]], lengths: Sequence[int]) -> TokenIds:
        outputs: dict[str, list[int]] = {}
        with (
            torch.no_grad(),
            llama.continuous_batching_context_manager(
                greedy, continuous_batching_config=batching, persistent_manager=True
            ) as manager,
        ):
            requests = [
                manager.add_request(prompt, max_new_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            while len(outputs) < len(requests):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("continuous batching stopped")
                elif result.error:
                    raise RuntimeError(result.error)
                elif result.is_finished():
                    outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[request] for request in requests]

    return Engine(generate, {"version": version("transformers"), "threads": torch.get_num_threads()})


if __name__ == "__main__":
    serve(load)
