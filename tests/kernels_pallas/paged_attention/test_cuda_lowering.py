"""The GPU kernels, lowered for an H100 where none is: every named shape makes Triton code, and nothing else attends."""

import re
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas.paged_attention import KVPool, paged_attention, write_kv
from kernels_pallas.paged_attention.interface import PoolSpec
from kernels_pallas.paged_attention.shapes import SHAPES, Shape

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")
MOST_POSITIONS = 8192


def lowered(shape: Shape, tiles: int, tokens: int, block_size: int, dtype: str) -> str:
    """Text of write and attention of one layer, for `tiles` tiles of `tokens` tokens."""
    num_blocks = 1024
    spec = PoolSpec(num_blocks, block_size, shape.num_kv_heads, shape.head_dim, jnp.dtype(dtype))
    array = jax.ShapeDtypeStruct((num_blocks + 1, shape.num_kv_heads, block_size, shape.head_dim), dtype)
    pool = KVPool((array, array), spec, "gpu")
    q = jax.ShapeDtypeStruct((tiles, tokens, shape.num_heads, shape.head_dim), dtype)
    rows = jax.ShapeDtypeStruct((tiles * tokens, shape.num_kv_heads, shape.head_dim), dtype)
    sinks = jax.ShapeDtypeStruct((shape.num_heads,), jnp.float32) if shape.sinks else None

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def layer(q, pool, k, v, block, offset, tables, first_position, num_tokens, sinks):  # type: ignore[no-untyped-def]
        pool = write_kv(pool, k, v, block, offset)
        options = {"sliding_window": shape.sliding_window, "logits_soft_cap": shape.logits_soft_cap, "sinks": sinks}
        scale = shape.head_dim**-0.5
        return paged_attention(q, pool, tables, first_position, num_tokens, scale=scale, **options), pool

    index, tables = ints(tiles * tokens), ints(tiles, MOST_POSITIONS // block_size)
    mesh = AbstractMesh((1,), ("x",), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # jax 0.12 deprecates the backend (docs/architecture.md).
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        traced = jax.jit(layer, donate_argnums=1).trace(
            q, pool, rows, rows, index, index, tables, ints(tiles), ints(tiles), sinks
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> list[str]:
    """Names of the Triton kernels, in the order and as often as the program runs past them: calls are followed."""
    bodies = dict(re.findall(r"^  func\.func \w+ @(\w+)\((.*?)^  }$", text, re.MULTILINE | re.DOTALL))

    @cache
    def inside(function: str) -> tuple[str, ...]:
        found: list[str] = []
        for line in bodies[function].splitlines():
            if "@__gpu$xla.gpu.triton(" in line:
                found.append(re.findall(r'name = "(\w+)"', line)[-1])
            elif called := re.search(r"\bcall @(\w+)\(", line):
                found += inside(called[1])
        return tuple(found)

    return list(inside("main"))


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("tiles", "tokens"), [(1, 1), (256, 1), (16, 32)])
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes(name: str, tiles: int, tokens: int, block_size: int) -> None:
    text = lowered(SHAPES[name], tiles, tokens, block_size, "bfloat16")
    assert kernels(text) in (["paged_attention"], ["paged_attention", "paged_attention_merge"])
    assert "stablehlo.dot_general" not in text and "stablehlo.while" not in text


@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("name", ["smollm2-135m", "phi-3-mini", "qwen3-0.6b", "gemma-2-9b", "gpt-oss-20b"])
def test_float32(name: str, tokens: int) -> None:
    assert kernels(lowered(SHAPES[name], 1, tokens, 16, "float32")) == ["paged_attention", "paged_attention_merge"]


def test_contexts_are_cut_only_where_the_tiles_do_not_fill_the_chip() -> None:
    shape = SHAPES["llama-3.1-8b"]
    assert kernels(lowered(shape, 1, 1, 16, "bfloat16")) == ["paged_attention", "paged_attention_merge"]
    assert kernels(lowered(shape, 256, 1, 16, "bfloat16")) == ["paged_attention"]
