"""Attention of many tiles: a lot of them, and a short stretch of positions, at a time.

The tiles are taken in the order of their last positions, the highest first, so those that a stretch of positions
concerns stand together: a short sequence costs nothing where only long ones go on, and padding costs nothing at all.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import PoolSpec, Variant
from kernels_pallas.paged_attention.reference import softmax
from kernels_pallas.paged_attention.reference.pages import page_size, page_tables, read_pages

# Enough work for a turn of a loop, and little enough to stay in cache: of 4 to 64 tiles and of 64, 128 and 256
# positions the best or near it for decodes and for prefills (docs/architecture.md). One tile has no neighbours.
_TILES_AT_ONCE = 16
_POSITIONS_AT_ONCE = 64
_POSITIONS_OF_ONE = 256


def attend_tiles(
    spec: PoolSpec,
    q: Float[Array, "N Hkv G Q D"],
    arrays: tuple[Array, ...],
    block_tables: Int[Array, "N M"],
    first_position: Int[Array, " N"],
    num_tokens: Int[Array, " N"],
    sinks: Float[Array, "Hkv G"] | None,
    variant: Variant,
) -> Float[Array, "N Hkv G Q D"]:
    """Row r of tile n is at position `first_position[n]` + r; rows from `num_tokens[n]` on come out as 0."""
    num_tiles, num_kv_heads, group, rows, head_dim = q.shape
    dtype = jnp.float32 if rows == 1 else jnp.promote_types(q.dtype, spec.dtype)
    lot = min(_TILES_AT_ONCE, num_tiles)
    tables, at_once = page_tables(spec, block_tables, _POSITIONS_OF_ONE if num_tiles == 1 else _POSITIONS_AT_ONCE)
    width = at_once * page_size(spec.block_size)

    last_position = jnp.where(num_tokens > 0, first_position + num_tokens - 1, -1)
    order = jnp.argsort(-last_position)
    last_position = _pad(last_position[order], lot, -1)
    first_position, tables = _pad(first_position[order], lot), _pad(tables[order], lot)
    queries = _pad(q[order].reshape(num_tiles, num_kv_heads, group * rows, head_dim).astype(dtype), lot)

    # The tiles that see something of a stretch are among those from `begin` to `end`.
    first_key = jnp.where(last_position >= 0, variant.first_key(first_position), 0)
    stretch_start = jnp.arange(tables.shape[1] // at_once)[:, None] * width
    begin = jnp.sum(jnp.cumprod(first_key >= stretch_start + width, axis=1), axis=1)
    end = jnp.sum(last_position >= stretch_start, axis=1)
    last_lot = jnp.cumsum((jnp.maximum(end - begin, 0) + lot - 1) // lot)

    def one_lot(i: Array, state: softmax.Softmax) -> softmax.Softmax:
        stretch = jnp.sum(i >= last_lot)
        before = jnp.where(stretch > 0, last_lot[stretch - 1], 0)
        tile = begin[stretch] + (i - before) * lot

        def own(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, tile, lot)

        key = stretch * width + jnp.arange(width)
        position = own(first_position)[:, None] + jnp.arange(rows)
        position = jnp.where(position <= own(last_position)[:, None], position, -1)
        sees = variant.sees(jnp.tile(position, group)[:, :, None], key)
        k, v = read_pages(arrays, jax.lax.dynamic_slice_in_dim(own(tables), stretch * at_once, at_once, axis=1), dtype)
        seen = (key >= own(first_key)[:, None]) & (key <= own(last_position)[:, None])
        v = jnp.where(seen[:, None, :, None], v, 0)
        new = softmax.absorb(jax.tree.map(own, state), own(queries), k, v, sees[:, None], variant)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, tile, axis=0), state, new)

    row_sinks = None if sinks is None else jnp.repeat(sinks, rows, axis=1)
    state = jax.lax.fori_loop(0, last_lot[-1], one_lot, softmax.begin(queries, row_sinks))
    out = softmax.finish(state)[jnp.argsort(order)].reshape(q.shape)
    is_used = jnp.arange(rows) < num_tokens[:, None]
    return jnp.where(is_used[:, None, None, :, None], out, 0).astype(q.dtype)


def _pad(x: Array, tiles: int, fill: int = 0) -> Array:
    """So many tiles more that a lot may begin at any of the first ones."""
    return jnp.pad(x, ((0, tiles),) + ((0, 0),) * (x.ndim - 1), constant_values=fill)
