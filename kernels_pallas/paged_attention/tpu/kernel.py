"""The kernel: one grid step is one tile, whose blocks come through two buffers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.paged_attention.interface import LOWEST, Variant
from kernels_pallas.paged_attention.tpu.head_groups import HeadGroup

Ref = Any  # jax does not name the type of a kernel's arguments


def paged_attention_kernel(
    # prefetched scalars
    first_position: Ref,  # [N]
    num_tokens: Ref,  # [N]
    next_used: Ref,  # [cores + N]
    # inputs
    table: Ref,  # [1, M], in SMEM
    next_table: Ref,  # [1, M]: that of the next tile with tokens
    q: Ref,  # [head groups, R, moved lanes]
    start: Ref,  # [head groups, R, 1]: a sink, or LOWEST
    pool: Ref,  # [blocks, block_size, lanes], in HBM
    # output
    out: Ref,  # [head groups, R, moved lanes]
    # scratch
    buffers: Ref,  # [2, blocks of a turn, block_size, lanes]
    softmax: Ref,  # [2, head groups, R, 1]: maximum and sum so far
    acc: Ref,  # [head groups, R, value lanes]
    first_buffer: Ref,  # [1]: where this tile's first turn is
    arrived: Ref,  # [2] semaphores
    *,
    group: HeadGroup,
    query_rows: int,
    variant: Variant,
    cores: int,
) -> None:
    """Attend from one tile, in turns of a few blocks; while one is computed, those of the next one arrive.

    The last turn fetches the first blocks of the next tile that has tokens, so only a core's very first turn waits for
    a whole read.
    """
    tile = pl.program_id(1) * cores + pl.program_id(0)
    after = next_used[tile + cores]
    _, blocks, block_size, _ = buffers.shape

    def block_range(tile: Array) -> tuple[Array, Array]:
        """The blocks that a tile's tokens see."""
        context_len = first_position[tile] + num_tokens[tile]
        return variant.first_key(first_position[tile]) // block_size, pl.cdiv(context_len, block_size)

    def for_each_copy(act: Callable[[Any], None], table: Ref, tile: Array, turn: Array | int, buffer: Array) -> None:
        begin, end = block_range(tile)
        begin = begin + turn * blocks

        def one(i: Array) -> None:
            source = pool.at[table[0, begin + i]]
            act(pltpu.make_async_copy(source, buffers.at[buffer, i], arrived.at[buffer]))

        _for_each(jnp.minimum(end - begin, blocks), one)

    def fetch(table: Ref, tile: Array, turn: Array | int, buffer: Array) -> None:
        for_each_copy(lambda copy: copy.start(), table, tile, turn, buffer)

    def wait(table: Ref, tile: Array, turn: Array, buffer: Array) -> None:
        for_each_copy(lambda copy: copy.wait(), table, tile, turn, buffer)

    begin, end = block_range(tile)
    num_turns = jnp.where(num_tokens[tile] > 0, pl.cdiv(end - begin, blocks), 0)

    @pl.when(tile == next_used[tile % cores])
    def _fetch_the_first() -> None:
        first_buffer[0] = 0
        fetch(table, tile, 0, jnp.int32(0))

    buffer_0 = first_buffer[0]
    # A sink is a logit that is there before the first key.
    softmax[0] = start[...]
    softmax[1] = jnp.where(start[...] > LOWEST, 1.0, 0.0)
    acc[...] = jnp.zeros_like(acc)
    # Rows are tokens of one head after another; those past the last token see nothing.
    row = jax.lax.broadcasted_iota(jnp.int32, (q.shape[1], 1), 0) % query_rows
    query_position = jnp.where(row < num_tokens[tile], first_position[tile] + row, -1)

    def turn(t: Array, _: None) -> None:
        buffer = (buffer_0 + t) % 2
        is_last = t == num_turns - 1

        @pl.when(jnp.logical_not(is_last))
        def _fetch_the_next_turn() -> None:
            fetch(table, tile, t + 1, 1 - buffer)

        @pl.when(is_last & (after < pl.num_programs(1) * cores))
        def _fetch_the_next_tile() -> None:
            fetch(next_table, after, 0, 1 - buffer)

        wait(table, tile, t, buffer)
        first_key = (begin + t * blocks) * block_size

        @pl.when(is_last)
        def _clear_what_lies_past_the_context() -> None:
            # 0 * NaN is NaN, so it must not reach the product at all.
            live = first_key + _positions(blocks, block_size) < first_position[tile] + num_tokens[tile]
            buffers[buffer] = jnp.where(live, buffers[buffer], 0)

        key_position = first_key + jax.lax.broadcasted_iota(jnp.int32, (1, blocks * block_size), 1)
        visible = variant.sees(query_position, key_position)
        for g in range(q.shape[0]):
            key = _lanes(buffers, buffer, g * group.lanes, group.key).astype(q.dtype)
            value = _lanes(buffers, buffer, g * group.lanes, group.value).astype(q.dtype) if group.is_split else key
            _attend_to(key, value, visible, group.padded(q[g]), softmax, acc, g, variant)

    jax.lax.fori_loop(0, num_turns, turn, None)
    first_buffer[0] = (buffer_0 + num_turns) % 2
    total = softmax[1]
    live = (row < num_tokens[tile])[None]
    out[...] = jnp.where(live, group.cut(acc[...]) / jnp.where(total > 0, total, 1), 0).astype(out.dtype)


def _attend_to(
    key: Float[Array, "S key_lanes"],
    value: Float[Array, "S value_lanes"],
    visible: Bool[Array, "R S"],
    q: Float[Array, "R key_lanes"],
    softmax: Ref,
    acc: Ref,
    g: int,
    variant: Variant,
) -> None:
    """Take S more positions into head group `g`'s online softmax (arXiv:1805.02867)."""
    # By default the matrix unit rounds float32 to bfloat16.
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    products = jax.lax.dot_general(
        q, key, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    logits = jnp.where(visible, variant.logits(products), -jnp.inf)
    maximum = jnp.maximum(softmax[0, g], logits.max(axis=1, keepdims=True))
    weights = jnp.exp(logits - maximum)
    shrink = jnp.exp(softmax[0, g] - maximum)
    softmax[0, g] = maximum
    softmax[1, g] = softmax[1, g] * shrink + weights.sum(axis=1, keepdims=True)
    acc[g] = acc[g] * shrink + jnp.dot(
        weights.astype(value.dtype), value, precision=precision, preferred_element_type=jnp.float32
    )


def _lanes(buffers: Ref, buffer: Array, first: int, lanes: slice) -> Float[Array, "S lanes"]:
    read = buffers[buffer, :, :, first + lanes.start : first + lanes.stop]
    return read.reshape(-1, read.shape[-1])


def _positions(blocks: int, block_size: int) -> Int[Array, "blocks block_size 1"]:
    block = jax.lax.broadcasted_iota(jnp.int32, (blocks, block_size, 1), 0)
    return block * block_size + jax.lax.broadcasted_iota(jnp.int32, (blocks, block_size, 1), 1)


def _for_each(count: Array, body: Callable[[Array], None]) -> None:
    """Four at a time: the scalar unit takes hardly longer for the addresses of four copies than for those of one."""

    def four(i: Array, _: None) -> None:
        for j in range(4):
            body(4 * i + j)

    jax.lax.fori_loop(0, count // 4, four, None)
    jax.lax.fori_loop(count // 4 * 4, count, lambda i, _: body(i), None)
