"""jaxpaged.LLM with its defaults."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jaxpaged
from benchmarks.peers.engines.protocol import Engine, TokenIds, serve
from jaxpaged import LLM, SamplingParams
from jaxpaged.compilation_cache import use_compilation_cache
from jaxpaged.engine.config import DType


def load(model: Path, dtype: str) -> Engine:
    use_compilation_cache()
    llm = LLM(model, dtype=cast(DType, dtype))

    def generate(prompts: Sequence[list[int]], lengths: Sequence[int]) -> TokenIds:
        llm.reset_prefix_cache()  # of the round before
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return Engine(generate, {"version": jaxpaged.__version__, "threads": os.cpu_count()})


if __name__ == "__main__":
    serve(load)
