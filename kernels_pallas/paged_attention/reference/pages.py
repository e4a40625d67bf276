"""The pool as pages: short stretches of positions, each contiguous with all its heads.

K is `[pages, num_kv_heads, head_dim, page_size]` and V `[pages, num_kv_heads, page_size, head_dim]`, the pages of a
block one after another: each page of one head is one contiguous matrix, as the product that reads it takes it.
"""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import PoolSpec

# Short enough to waste little on the last one of a sequence, long enough for a matrix product.
_MOST_POSITIONS = 64


def page_size(block_size: int) -> int:
    """Positions in a page: 64, or the whole block if 64 does not divide it and what divides both is tiny."""
    common = math.gcd(block_size, _MOST_POSITIONS)
    return common if common >= _MOST_POSITIONS // 4 else block_size


def init_pages(spec: PoolSpec) -> tuple[Array, Array]:
    size = page_size(spec.block_size)
    heads = (spec.num_blocks + 1) * (spec.block_size // size), spec.num_kv_heads
    return jnp.zeros((*heads, spec.head_dim, size), spec.dtype), jnp.zeros((*heads, size, spec.head_dim), spec.dtype)


def page_tables(
    spec: PoolSpec, block_tables: Int[Array, "N M"], positions_at_once: int
) -> tuple[Int[Array, "N P"], int]:
    """The pages of each sequence, and how many to read at once, which divides P.

    P is at least twice that many: a loop of one turn XLA unrolls into its surroundings, where it then copies the pool.
    """
    size = page_size(spec.block_size)
    in_block = spec.block_size // size
    tables = (block_tables[:, :, None] * in_block + jnp.arange(in_block)).reshape(len(block_tables), -1)
    at_once = max(1, min(positions_at_once // size, tables.shape[1]))
    missing = max(-tables.shape[1] % at_once, 2 * at_once - tables.shape[1])
    return jnp.pad(tables, ((0, 0), (0, missing)), constant_values=spec.num_blocks * in_block), at_once


def read_pages(
    arrays: tuple[Array, ...], pages: Int[Array, "N P"], dtype: DTypeLike
) -> tuple[Float[Array, "N Hkv D width"], Float[Array, "N Hkv width D"]]:
    """P pages of each of N sequences, one after another."""
    k, v = (array[pages].astype(dtype) for array in arrays)
    num_sequences, num_pages, num_heads, head_dim, size = k.shape
    heads = num_sequences, num_heads
    k = k.transpose(0, 2, 3, 1, 4).reshape(*heads, head_dim, num_pages * size)
    return k, v.swapaxes(1, 2).reshape(*heads, num_pages * size, head_dim)
