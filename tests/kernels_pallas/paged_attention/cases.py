"""Drawn cases of paged attention: the pool, the queries, and what the definition says comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jaxtyping import Array

from kernels_pallas.paged_attention import KVPool, init_kv_pool, paged_attention, write_kv
from tests.kernels_pallas.paged_attention.dense import dense_attention


@dataclass(frozen=True)
class Case:
    """tiles: first position and number of tokens of each. shared: all tiles read the blocks of one sequence."""

    tiles: tuple[tuple[int, int], ...]
    rows: int
    block_size: int
    num_kv_heads: int
    group: int
    head_dim: int
    dtype: str
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False
    scale_by: float = 1.0
    spare_columns: int = 0
    shared: bool = False
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": self.scale_by * self.head_dim**-0.5,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
        }


@st.composite
def draw_case(
    draw: st.DrawFn,
    *,
    block_sizes: Sequence[int],
    head_dims: Sequence[int],
    rows: Sequence[int],
    most_positions: int = 100,
) -> Case:
    block_size = draw(st.sampled_from(block_sizes))
    window = draw(st.one_of(st.none(), st.sampled_from([1, block_size, block_size + 1]), st.integers(2, 60)))
    edges = [block_size - 1, block_size, block_size + 1, 2 * block_size]
    if window:
        edges += [window - 1, window, window + 1, window + block_size]
    head_dim = draw(st.sampled_from(head_dims))
    width = draw(st.sampled_from(rows))
    tile = st.tuples(
        st.one_of(st.sampled_from(edges), st.integers(0, most_positions)),
        st.one_of(st.just(width), st.integers(0, width)),
    )
    return Case(
        tiles=tuple(draw(st.lists(tile, min_size=1, max_size=4))),
        rows=width,
        block_size=block_size,
        num_kv_heads=draw(st.sampled_from([2, 4] if head_dim == 96 else [1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 16])),
        head_dim=head_dim,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        sliding_window=window,
        logits_soft_cap=draw(st.sampled_from([None, None, 2.0, 50.0])),
        has_sinks=draw(st.booleans()),
        scale_by=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),  # more, and float32 itself is off by the tolerance
        spare_columns=draw(st.integers(0, 3)),
        shared=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class Problem:
    """A case with its numbers, on the device; `unread` are the columns of each table that no tile may look at."""

    case: Case
    q: Array
    pool: KVPool
    block_tables: np.ndarray
    first_position: np.ndarray
    num_tokens: np.ndarray
    sinks: Array | None
    want: np.ndarray

    def with_implementation(self, name: str) -> "Problem":
        """The same pool, served by another implementation of the same layout."""
        return replace(self, pool=replace(self.pool, implementation=name))

    def attend(self) -> Array:
        return paged_attention(
            self.q,
            self.pool,
            jnp.asarray(self.block_tables),
            jnp.asarray(self.first_position),
            jnp.asarray(self.num_tokens),
            sinks=self.sinks,
            **self.case.options,
        )


def make_problem(case: Case, implementation: str, unread_block: int | None = None) -> Problem:
    """NaN stands in every place that no live position owns, in the scratch block, and in the padding rows of q.

    `unread_block`, by default the scratch block, stands in the tables wherever no token of the tile sees the block.
    """
    rng = np.random.default_rng(case.seed)
    dtype = jnp.dtype(case.dtype)

    def normal(*shape: int) -> np.ndarray:
        """Normal numbers that the dtype holds exactly."""
        return np.array(jnp.asarray(rng.standard_normal(shape), dtype).astype(jnp.float32))

    first = [position for position, _ in case.tiles]
    count = [tokens for _, tokens in case.tiles]
    lengths = [f + c if c else 0 for f, c in zip(first, count, strict=True)]
    if case.shared:
        lengths = [max(lengths)] * len(lengths)
    needed = [-(-length // case.block_size) for length in lengths]
    num_blocks = sum(needed) + 2
    free = list(rng.permutation(num_blocks))
    tables = np.full((len(first), max(1, *needed) + case.spare_columns), num_blocks, np.int32)
    pool = init_kv_pool(num_blocks, case.block_size, case.num_kv_heads, case.head_dim, dtype, implementation)
    pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)
    keys, values = [], []
    for n, length in enumerate(lengths):
        if case.shared and n:
            tables[n], k, v = tables[0], keys[0], values[0]
        else:
            tables[n, : needed[n]] = [free.pop() for _ in range(needed[n])]
            k, v = normal(length, case.num_kv_heads, case.head_dim), normal(length, case.num_kv_heads, case.head_dim)
            position = np.arange(length)
            block = jnp.asarray(tables[n][position // case.block_size])
            pool = write_kv(
                pool, jnp.asarray(k, dtype), jnp.asarray(v, dtype), block, jnp.asarray(position % case.block_size)
            )
        keys.append(k)
        values.append(v)

    for n in range(len(first)):
        last = first[n] + count[n] - 1 if count[n] else -1
        lowest = 0 if case.sliding_window is None else max(0, first[n] - case.sliding_window + 1)
        block = np.arange(tables.shape[1])
        unread = (block < lowest // case.block_size) | (block * case.block_size > last)
        tables[n, unread] = num_blocks if unread_block is None else unread_block

    num_heads = case.num_kv_heads * case.group
    q = normal(len(first), case.rows, num_heads, case.head_dim)
    for n, tokens in enumerate(count):
        q[n, tokens:] = np.nan
    sinks = rng.standard_normal(num_heads).astype(np.float32) * 2 if case.has_sinks else None
    return Problem(
        case,
        jnp.asarray(q, dtype),
        pool,
        tables,
        np.asarray(first, np.int32),
        np.asarray(count, np.int32),
        None if sinks is None else jnp.asarray(sinks),
        dense_attention(q, keys, values, first, count, sinks=sinks, **case.options),
    )
