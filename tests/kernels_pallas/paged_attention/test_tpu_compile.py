"""The real TPU compiler takes the kernel at every named shape, and makes no hidden copy of a pool around it."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.hlo import Module
from benchmarks.topology import compile_for
from benchmarks.tpu_kernels import Load, compile_write_and_attention, pool_shape
from kernels_pallas.paged_attention.shapes import SHAPES
from tests.tpu_compiler import needs_tpu_compiler

DECODE_16, DECODE_256 = Load(64, 1, 4096, 16), Load(64, 1, 4096, 256)
PREFILL_16, PREFILL_256 = Load(16, 32, 4096, 16), Load(16, 32, 4096, 256)
OF_CHIP = {
    "v5e": [DECODE_16, PREFILL_256],
    "v6e": [DECODE_256, PREFILL_16],
    "v5p": [DECODE_16, PREFILL_256],
}
FLOAT32 = [
    ("v5e", "smollm2-135m", Load(64, 1, 4096, 16, "float32")),
    ("v6e", "llama-3.1-8b", Load(16, 32, 4096, 16, "float32")),
    ("v5p", "gemma-2-9b", Load(64, 1, 4096, 256, "float32")),
]
CASES = [(chip, name, load) for chip, loads in OF_CHIP.items() for name in SHAPES for load in loads] + FLOAT32


def _name(case: tuple[str, str, Load]) -> str:
    chip, name, load = case
    return f"{chip}-{name}-{'decode' if load.rows == 1 else 'prefill'}-{load.block_size}-{load.dtype}"


@needs_tpu_compiler
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_compiles_with_the_kernel_in_it_and_no_copy_of_the_pool(case: tuple[str, str, Load]) -> None:
    chip, name, load = case
    program = compile_write_and_attention(chip, SHAPES[name], load)
    (pool,) = pool_shape(SHAPES[name], load).arrays
    pool_bytes = pool.size * pool.dtype.itemsize
    module = Module.parse(program.text)
    assert len(module.kernels) == 1
    assert module.kernels[0].vmem_bytes > 0
    assert program.sizes.alias_size_in_bytes == pool_bytes
    # Queries and results may be transposed; a register's 128 lanes are the least that a row of them takes.
    shape = SHAPES[name]
    queries = load.tiles * load.rows * shape.num_heads * max(shape.head_dim, 128) * pool.dtype.itemsize
    assert program.sizes.temp_size_in_bytes < pool_bytes / 8 + 2 * queries
    assert not module.copies(pool)


@needs_tpu_compiler
def test_a_copy_of_the_pool_would_be_seen() -> None:
    """A pool that is not donated has to be copied before it is written."""
    pool = jax.ShapeDtypeStruct((64, 16, 2048), jnp.bfloat16)
    program = compile_for("v5e", lambda pool: pool.at[3, 5].set(1), pool)
    assert program.sizes.alias_size_in_bytes == 0
    assert Module.parse(program.text).copies(pool)
