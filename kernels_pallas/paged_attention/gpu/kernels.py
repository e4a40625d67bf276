"""The two kernels, for the Triton backend. Refs are whole arrays but for the axes that the grid has picked.

Triton's arrays have sizes that are powers of two: what is past an axis's end is read as 0 and not written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from kernels_pallas.paged_attention.gpu.plan import TileSizes, part_bounds
from kernels_pallas.paged_attention.interface import LOWEST, Variant


def paged_attention_kernel(
    block_table_ref: Any,  # [M]
    first_position_ref: Any,  # []
    num_tokens_ref: Any,  # []
    q_ref: Any,  # [Q, G, D]
    k_ref: Any,  # [num_blocks + 1, block_size, D]
    v_ref: Any,  # the same
    *refs: Any,  # sinks [G], if there are any. Then out [Q, G, D]; of several parts: maximum, total [Q, G] before it
    sizes: TileSizes,
    parts: int,
    variant: Variant,
    has_sinks: bool,
) -> None:
    """Online softmax (arXiv:1805.02867) of some rows of a tile, for one KV head, over one part of their context."""
    sinks_ref, out_refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    tokens, group, head_dim = q_ref.shape
    block_size = k_ref.shape[1]
    dtype = jnp.promote_types(q_ref.dtype, k_ref.dtype)
    chunk, part = jax.lax.div(pl.program_id(2), parts), jax.lax.rem(pl.program_id(2), parts)
    first_position, num_tokens = first_position_ref[...], num_tokens_ref[...]

    row = chunk * sizes.rows + jnp.arange(sizes.rows, dtype=jnp.int32)
    token, member = jax.lax.div(row, group), jax.lax.rem(row, group)
    row_exists = token < tokens
    row_position = jnp.where(token < num_tokens, first_position + token, -1)
    dim = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)
    dim_exists = (dim < head_dim)[None, :]
    matrix = (token[:, None], member[:, None], dim[None, :])
    q = plgpu.load(q_ref.at[matrix], mask=(token < num_tokens)[:, None] & dim_exists, other=0).astype(dtype)

    first_token = jax.lax.div(chunk * sizes.rows, group)
    last_token = jnp.minimum(jax.lax.div((chunk + 1) * sizes.rows - 1, group), num_tokens - 1)
    # From a block's beginning: the blocks wholly before the window are not read.
    begin = jax.lax.div(variant.first_key(first_position + first_token), block_size) * block_size
    end = jnp.where(first_token < num_tokens, first_position + last_token + 1, begin)
    begin, end = part_bounds(begin, end, part, parts, sizes)
    num_turns = pl.cdiv(jnp.maximum(end - begin, 0), sizes.positions)

    def positions_of(i: Array | int) -> Array:
        return begin + i * sizes.positions + jnp.arange(sizes.positions, dtype=jnp.int32)

    def blocks_of(i: Array | int) -> Array:
        position = positions_of(i)
        return plgpu.load(block_table_ref.at[jax.lax.div(position, block_size)], mask=position < end, other=0)

    def turn(i: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        maximum, total, out, blocks = carry
        # A turn ahead: loads that wait for a load of their own turn Triton pipelines with half the buffers.
        next_blocks = blocks_of(i + 1)
        position = positions_of(i)
        place = (blocks[:, None], jax.lax.rem(position, block_size)[:, None], dim[None, :])
        # 0 * NaN is NaN: what lies past the context must not reach the product at all.
        mask = (position < end)[:, None] & dim_exists
        k = plgpu.load(k_ref.at[place], mask=mask, other=0).astype(dtype)
        v = plgpu.load(v_ref.at[place], mask=mask, other=0).astype(dtype)
        logits = variant.logits(_dot(q, k.T))
        logits = jnp.where(variant.sees(row_position[:, None], position[None, :]), logits, -jnp.inf)
        new_maximum = jnp.maximum(maximum, logits.max(axis=1))
        weights = jnp.exp(logits - new_maximum[:, None])
        shrink = jnp.exp(maximum - new_maximum)
        total = total * shrink + weights.sum(axis=1)
        out = out * shrink[:, None] + _dot(weights.astype(dtype), v)
        return new_maximum, total, out, next_blocks

    maximum = jnp.full(sizes.rows, LOWEST, jnp.float32)
    total = jnp.zeros(sizes.rows, jnp.float32)
    if sinks_ref is not None:
        # A sink is a logit that is there before the first key, so in the first part alone.
        maximum = jnp.where(part == 0, plgpu.load(sinks_ref.at[member]), maximum)
        total = jnp.where(part == 0, 1, total)
    out = jnp.zeros((sizes.rows, dim.size), jnp.float32)
    maximum, total, out, _ = jax.lax.fori_loop(0, num_turns, turn, (maximum, total, out, blocks_of(0)))

    out_mask = row_exists[:, None] & dim_exists
    if parts == 1:
        (out_ref,) = out_refs
        out = out / jnp.where(total > 0, total, 1)[:, None]
        plgpu.store(out_ref.at[matrix], out.astype(out_ref.dtype), mask=out_mask)
        return
    maximum_ref, total_ref, out_ref = out_refs
    plgpu.store(maximum_ref.at[token, member], jnp.where(num_turns > 0, maximum, LOWEST), mask=row_exists)

    @pl.when(num_turns > 0)
    def store_part() -> None:
        plgpu.store(total_ref.at[token, member], total, mask=row_exists)
        plgpu.store(out_ref.at[matrix], out, mask=out_mask)


def merge_kernel(
    maximum_ref: Any,  # [parts]
    total_ref: Any,  # [parts]
    part_ref: Any,  # [parts, D]
    out_ref: Any,  # [D]
) -> None:
    """One row's result from its parts. Of an empty part nothing but the maximum has been written."""
    parts, head_dim = part_ref.shape
    part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)
    dim = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)
    maximum = plgpu.load(maximum_ref.at[part], mask=part < parts, other=LOWEST)
    used = maximum > LOWEST
    weight = jnp.exp(maximum - maximum.max(axis=0))
    total = jnp.sum(weight * plgpu.load(total_ref.at[part], mask=used, other=0), axis=0)
    mask = used[:, None] & (dim < head_dim)[None, :]
    out = plgpu.load(part_ref.at[part[:, None], dim[None, :]], mask=mask, other=0)
    out = jnp.sum(weight[:, None] * out, axis=0) / jnp.where(total > 0, total, 1)
    plgpu.store(out_ref.at[dim], out.astype(out_ref.dtype), mask=dim < head_dim)


def _dot(a: Array, b: Array) -> Array:
    """In float32, and of float32 operands exactly so: by default a GPU would round them to 10 bits."""
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
