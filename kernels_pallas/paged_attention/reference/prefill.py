"""Prefill: tiles of several tokens of one sequence, one tile after another, each up to its own last position."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import PoolSpec, Variant
from kernels_pallas.paged_attention.reference import softmax
from kernels_pallas.paged_attention.reference.pages import page_tables, read_pages

# Read in one turn of the loop: enough for a matrix product, few enough to stay in cache.
_POSITIONS_AT_ONCE = 256


def attend_prefills(
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
    tables, at_once = page_tables(spec, block_tables, _POSITIONS_AT_ONCE)
    tables = tables.reshape(len(q), -1, at_once)

    def one_tile(i: Array, out: Array) -> Array:
        tile = _attend_tile(q[i], arrays, tables[i], first_position[i], num_tokens[i], sinks, variant)
        return out.at[i].set(tile)

    num_used = jnp.max(jnp.where(num_tokens > 0, jnp.arange(len(q)) + 1, 0), initial=0)
    return jax.lax.fori_loop(0, num_used, one_tile, jnp.zeros_like(q))


def _attend_tile(
    q: Float[Array, "Hkv G Q D"],
    arrays: tuple[Array, ...],
    tables: Int[Array, "turns at_once"],
    first_position: Int[Array, ""],
    num_tokens: Int[Array, ""],
    sinks: Float[Array, "Hkv G"] | None,
    variant: Variant,
) -> Float[Array, "Hkv G Q D"]:
    """From the stretch of the first position that a row sees to that of the last one."""
    num_kv_heads, group, rows, head_dim = q.shape
    dtype = jnp.promote_types(q.dtype, arrays[0].dtype)
    queries = q.reshape(1, num_kv_heads, group * rows, head_dim).astype(dtype)
    is_used = jnp.arange(rows) < num_tokens
    row_position = jnp.tile(jnp.where(is_used, first_position + jnp.arange(rows), -1), group)[:, None]
    first_key = variant.first_key(first_position)
    width = tables.shape[1] * arrays[1].shape[2]
    context_len = jnp.where(num_tokens > 0, first_position + num_tokens, 0)

    def turn(i: Array, state: softmax.Softmax) -> softmax.Softmax:
        key = i * width + jnp.arange(width)
        k, v = read_pages(arrays, tables[i][None], dtype)
        v = jnp.where(((key >= first_key) & (key < context_len))[:, None], v, 0)
        return softmax.absorb(state, queries, k, v, variant.sees(row_position, key)[None, None], variant)

    row_sinks = None if sinks is None else jnp.repeat(sinks, rows, axis=1)
    num_turns = (context_len + width - 1) // width
    state = jax.lax.fori_loop(first_key // width, num_turns, turn, softmax.begin(queries, row_sinks))
    out = softmax.finish(state).reshape(q.shape)
    return jnp.where(is_used[:, None], out, 0).astype(q.dtype)
