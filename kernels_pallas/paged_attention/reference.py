"""Paged attention in plain jnp: the definition the kernels are held to, and what runs on CPU.

Layout: K `[num_blocks + 1, num_kv_heads, head_dim, block_size]` and V `[num_blocks + 1, num_kv_heads, block_size,
head_dim]`, so that one block of one head is one contiguous matrix, as the product that reads it takes it. On CPU that
is the fastest of the layouts measured (docs/architecture.md).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import LOWEST, PoolSpec, Variant, check_dtype

# Positions read in one turn of the loop: enough for a matrix product, few enough to stay in cache.
_POSITIONS_PER_TURN = 256
# Of the numbers 1, 4, 8, 16, 64 the best or near it at every length measured; 64 take four times as long.
_DECODE_TILES_AT_ONCE = 8


@dataclass(frozen=True)
class Reference:
    def check(self, spec: PoolSpec) -> None:
        """Any shape will do."""
        check_dtype(spec.dtype, "pools", ("bfloat16", "float16", "float32"))

    def init_arrays(self, spec: PoolSpec) -> tuple[Array, ...]:
        heads = spec.num_blocks + 1, spec.num_kv_heads
        k_pool = jnp.zeros((*heads, spec.head_dim, spec.block_size), spec.dtype)
        return k_pool, jnp.zeros((*heads, spec.block_size, spec.head_dim), spec.dtype)

    def write(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        block: Int[Array, " T"],
        offset: Int[Array, " T"],
    ) -> tuple[Array, ...]:
        k_pool, v_pool = arrays
        return (
            k_pool.at[block, :, :, offset].set(k.astype(k_pool.dtype)),
            v_pool.at[block, :, offset].set(v.astype(v_pool.dtype)),
        )

    def attend(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        q: Float[Array, "N Q H D"],
        block_tables: Int[Array, "N M"],
        first_position: Int[Array, " N"],
        num_tokens: Int[Array, " N"],
        sinks: Float[Array, " H"] | None,
        variant: Variant,
    ) -> Float[Array, "N Q H D"]:
        """A few decode tiles at once, wider tiles one after another, each lot up to its own longest context.

        One row has too little work to be worth a turn of a loop, and the blocks of too many at once do not stay in
        cache. So neither padding nor a long neighbour costs a tile anything, or, in decode, little.
        """
        num_tiles, rows, num_heads, head_dim = q.shape
        group = num_heads // spec.num_kv_heads
        blocks_per_turn = max(1, min(_POSITIONS_PER_TURN // spec.block_size, block_tables.shape[1]))
        block_tables = _pad_columns(block_tables, blocks_per_turn, fill=spec.num_blocks)
        grouped = q.reshape(num_tiles, rows, spec.num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
        grouped_sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(spec.num_kv_heads, group)
        lot = min(_DECODE_TILES_AT_ONCE, num_tiles) if rows == 1 else 1
        tiles = [_pad_rows(x, lot) for x in (grouped, block_tables, first_position, num_tokens)]

        def one_lot(i: Array, out: Array) -> Array:
            attended = _attend_tiles(
                *(jax.lax.dynamic_slice_in_dim(x, i * lot, lot) for x in tiles),
                arrays=arrays,
                sinks=grouped_sinks,
                variant=variant,
                blocks_per_turn=blocks_per_turn,
            )
            return jax.lax.dynamic_update_slice_in_dim(out, attended, i * lot, axis=0)

        num_used = jnp.max(jnp.where(num_tokens > 0, jnp.arange(num_tiles) + 1, 0), initial=0)
        out = jax.lax.fori_loop(0, (num_used + lot - 1) // lot, one_lot, jnp.zeros_like(tiles[0]))
        return out[:num_tiles].transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _attend_tiles(
    q: Float[Array, "N Hkv G Q D"],
    block_tables: Int[Array, "N M"],
    first_position: Int[Array, " N"],
    num_tokens: Int[Array, " N"],
    *,
    arrays: tuple[Array, ...],
    sinks: Float[Array, "Hkv G"] | None,
    variant: Variant,
    blocks_per_turn: int,
) -> Float[Array, "N Hkv G Q D"]:
    """Online softmax (arXiv:1805.02867) over the blocks, `blocks_per_turn` at a time, from the first block that a tile
    sees to the last one."""
    k_pool, v_pool = arrays
    num_tiles, num_kv_heads, group, rows, head_dim = q.shape
    dtype = jnp.promote_types(q.dtype, k_pool.dtype) if rows > 1 else jnp.float32
    # Not the default: a GPU would round float32 to 10 bits, a TPU to 8.
    precision = jax.lax.Precision.HIGHEST
    positions_per_turn = blocks_per_turn * v_pool.shape[2]
    first_key = variant.first_key(first_position)
    context_len = jnp.where(num_tokens > 0, first_position + num_tokens, 0)
    row_valid = jnp.arange(rows) < num_tokens[:, None]
    row_position = jnp.where(row_valid, first_position[:, None] + jnp.arange(rows), -1)
    row_position = jnp.repeat(row_position[:, None], group, axis=1).reshape(num_tiles, 1, group * rows, 1)
    queries = q.reshape(num_tiles, num_kv_heads, group * rows, head_dim).astype(dtype)

    def read_keys(blocks: Array) -> Array:
        """[N, P] block ids -> [N, Hkv, D, P * block_size]."""
        pages = k_pool[blocks].astype(dtype).transpose(0, 2, 3, 1, 4)
        return pages.reshape(num_tiles, num_kv_heads, head_dim, positions_per_turn)

    def read_values(blocks: Array) -> Array:
        """[N, P] block ids -> [N, Hkv, P * block_size, D]."""
        pages = v_pool[blocks].astype(dtype).swapaxes(1, 2)
        return pages.reshape(num_tiles, num_kv_heads, positions_per_turn, head_dim)

    def turn(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, out = carry
        blocks = jax.lax.dynamic_slice_in_dim(block_tables, i * blocks_per_turn, blocks_per_turn, axis=1)
        position = i * positions_per_turn + jnp.arange(positions_per_turn)
        k = read_keys(blocks)
        # 0 * NaN is NaN: what lies past the context must not reach the product at all.
        live = (position >= first_key[:, None]) & (position < context_len[:, None])
        v = jnp.where(live[:, None, :, None], read_values(blocks), 0)
        products = jnp.einsum("nhqd,nhds->nhqs", queries, k, precision=precision, preferred_element_type=jnp.float32)
        logits = jnp.where(variant.sees(row_position, position), variant.logits(products), -jnp.inf)
        new_maximum = jnp.maximum(maximum, logits.max(axis=-1))
        weights = jnp.exp(logits - new_maximum[..., None])
        shrink = jnp.exp(maximum - new_maximum)
        total = total * shrink + weights.sum(axis=-1)
        update = jnp.einsum(
            "nhqs,nhsd->nhqd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return new_maximum, total, out * shrink[..., None] + update

    # A sink is a logit that is there before the first key.
    start = jnp.asarray(LOWEST, jnp.float32) if sinks is None else jnp.repeat(sinks, rows, axis=1)
    maximum = jnp.broadcast_to(start, queries.shape[:3])
    state = (maximum, jnp.where(maximum > LOWEST, 1.0, 0.0), jnp.zeros(queries.shape, jnp.float32))
    first_turn = jnp.min(jnp.where(num_tokens > 0, first_key, jnp.iinfo(jnp.int32).max)) // positions_per_turn
    num_turns = (jnp.max(context_len, initial=0) + positions_per_turn - 1) // positions_per_turn
    _, total, out = jax.lax.fori_loop(first_turn, num_turns, turn, state)
    out = (out / jnp.where(total > 0, total, 1)[..., None]).reshape(q.shape)
    return jnp.where(row_valid[:, None, None, :, None], out, 0).astype(q.dtype)


def _pad_columns(block_tables: Int[Array, "N M"], multiple: int, fill: int) -> Int[Array, "N M2"]:
    """Pad to a multiple, and to two turns at least: a loop of one turn XLA unrolls into its surroundings, where it then
    copies the pool."""
    missing = max(-block_tables.shape[1] % multiple, 2 * multiple - block_tables.shape[1])
    return jnp.pad(block_tables, ((0, 0), (0, missing)), constant_values=fill)


def _pad_rows(x: Array, multiple: int) -> Array:
    return jnp.pad(x, ((0, -len(x) % multiple),) + ((0, 0),) * (x.ndim - 1))
