"""The real TPU compiler takes the whole run loop, with the kernel inside, and updates every pool in place."""

from dataclasses import replace

import pytest

from benchmarks.hlo import Module, count_step
from benchmarks.loops import MODELS, Loop
from benchmarks.topology import num_bytes
from jaxpaged.engine.config import EngineConfig
from tests.tpu_compiler import needs_tpu_compiler

LAYERS = 2
# A decode, a batch of them, and prefill chunks: a bucket of each kind.
CONFIG = EngineConfig(
    num_blocks=4096,
    block_size=16,
    max_num_seqs=8,
    max_num_waiting=64,
    max_num_batched_tokens=128,
    max_model_len=4096,
)


@needs_tpu_compiler
@pytest.mark.parametrize("name", MODELS)
def test_the_loop_compiles_and_every_pool_is_updated_in_place(name: str) -> None:
    loop = Loop.of(replace(MODELS[name], num_layers=LAYERS), CONFIG)
    program = loop.compile("v5e")
    (pool,) = loop.state.kv[0].arrays
    module = Module.parse(program.text)
    # One kernel for decode tiles and one for prefill tiles, in each bucket and layer that has them.
    calls = sum((bucket.decode_tiles > 0) + (bucket.prefill_tiles > 0) for bucket in CONFIG.buckets)
    assert len(module.kernels) == LAYERS * calls
    assert program.sizes.alias_size_in_bytes >= num_bytes(loop.state)
    assert program.sizes.temp_size_in_bytes < num_bytes(pool) / 8
    assert not module.copies(pool)
    assert {"make_schedule", "allocate", "sample", "commit"} <= count_step(module).keys()
