"""Decode: one token of each of many sequences, a few sequences and a short stretch of positions at a time.

The sequences are taken longest first, so those that a stretch of positions concerns stand together: a short one costs
nothing where only long ones go on, and padding costs nothing at all.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import PoolSpec, Variant
from kernels_pallas.paged_attention.reference import softmax
from kernels_pallas.paged_attention.reference.pages import page_size, page_tables, read_pages

# Of 4, 8, 16 and 32 sequences and 32 to 256 positions the best or near it from 8 to 64 sequences; a single sequence,
# which has no neighbour to wait for, takes more positions at once (docs/architecture.md).
_SEQUENCES_AT_ONCE = 8
_POSITIONS_AT_ONCE = 128
_POSITIONS_OF_ONE = 256


def attend_decodes(
    spec: PoolSpec,
    q: Float[Array, "N Hkv G D"],
    arrays: tuple[Array, ...],
    block_tables: Int[Array, "N M"],
    position: Int[Array, " N"],
    sinks: Float[Array, "Hkv G"] | None,
    variant: Variant,
) -> Float[Array, "N Hkv G D"]:
    """`position` of each token in its sequence; -1 for padding, which comes out as 0."""
    num_sequences = len(q)
    lot = min(_SEQUENCES_AT_ONCE, num_sequences)
    order = jnp.argsort(-position)
    tables, at_once = page_tables(spec, block_tables[order], _POSITIONS_OF_ONE if len(q) == 1 else _POSITIONS_AT_ONCE)
    width = at_once * page_size(spec.block_size)
    q, tables = _pad(q[order].astype(jnp.float32), lot), _pad(tables, lot)
    position = _pad(position[order], lot, -1)

    # The sequences that see something of a stretch are those from `begin` to `end`.
    first = jnp.arange(tables.shape[1] // at_once)[:, None] * width
    begin = jnp.sum(variant.first_key(position) >= first + width, axis=1)
    end = jnp.sum(position >= first, axis=1)
    last_lot = jnp.cumsum((jnp.maximum(end - begin, 0) + lot - 1) // lot)

    def one_lot(i: Array, state: softmax.Softmax) -> softmax.Softmax:
        stretch = jnp.sum(i >= last_lot)
        before = jnp.where(stretch > 0, last_lot[stretch - 1], 0)
        row = begin[stretch] + (i - before) * lot
        own_state, own_q, own_tables, own_position = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, row, lot), (state, q, tables, position)
        )
        key = stretch * width + jnp.arange(width)
        sees = variant.sees(own_position[:, None], key)
        pages = jax.lax.dynamic_slice_in_dim(own_tables, stretch * at_once, at_once, axis=1)
        k, v = read_pages(arrays, pages, jnp.float32)
        v = jnp.where(sees[:, None, :, None], v, 0)
        own_state = softmax.absorb(own_state, own_q, k, v, sees[:, None, None], variant)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row, axis=0), state, own_state)

    state = jax.lax.fori_loop(0, last_lot[-1], one_lot, softmax.begin(q, sinks))
    return jnp.zeros((num_sequences, *q.shape[1:]), jnp.float32).at[order].set(softmax.finish(state)[:num_sequences])


def _pad(x: Array, rows: int, fill: int = 0) -> Array:
    """So many rows more that a lot may begin at any row of the first ones."""
    return jnp.pad(x, ((0, rows),) + ((0, 0),) * (x.ndim - 1), constant_values=fill)
