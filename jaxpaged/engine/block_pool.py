"""Which blocks are free: a queue, handed out from its front and released to its back (docs/scheduler.md).

A block may have several holders, sequences with the same beginning; it is free when the last one has released it. What
a free block holds stays readable until it is handed out again, so the queue's order is also the prefix cache's: what
was used least recently goes first.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine.sums import cumsum, exclusive_cumsum


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPool:
    """The free blocks are `free[(front + i) % N]` for i < num_free. The rest of the ring is stale.

    holders: of each block, the sequences that hold it; 0 for the free ones.
    """

    free: Int32[Array, " N"]
    front: Int32[Array, ""]
    num_free: Int32[Array, ""]
    holders: Int32[Array, " N"]


def init_block_pool(num_blocks: int) -> BlockPool:
    """A fresh pool: blocks 0, 1, 2, ... are free, in this order."""
    return BlockPool(
        free=jnp.arange(num_blocks, dtype=jnp.int32),
        front=jnp.int32(0),
        num_free=jnp.int32(num_blocks),
        holders=jnp.zeros(num_blocks, jnp.int32),
    )


def take(pool: BlockPool, count: Int32[Array, ""], most: int) -> tuple[BlockPool, Int32[Array, " most"]]:
    """Hand out `count` blocks, each to one holder: the first so many entries of what is returned. They must be free.

    The entries behind them are N, which is no block.
    """
    size, i = pool.free.shape[0], jnp.arange(most)
    taken = pool.free.at[(pool.front + i) % size].get(mode="promise_in_bounds", wrap_negative_indices=False)
    taken = jnp.where(i < count, taken, size)
    holders = pool.holders.at[taken].set(1, mode="drop")
    return BlockPool(pool.free, (pool.front + count) % size, pool.num_free - count, holders), taken


def share(pool: BlockPool, blocks: Int32[Array, "S M"], shared: Bool[Array, "S M"]) -> BlockPool:
    """One holder more for each of `blocks` where `shared`; the free ones among them leave the queue."""
    size = pool.free.shape[0]
    holders = pool.holders.at[jnp.where(shared, blocks, size)].add(1, mode="drop")
    i = jnp.arange(size)
    queue = pool.free.at[(pool.front + i) % size].get(mode="promise_in_bounds", wrap_negative_indices=False)
    stays = (i < pool.num_free) & (holders[queue] == 0)
    free = pool.free.at[jnp.where(stays, jnp.cumsum(stays) - 1, size)].set(queue, mode="drop")
    return BlockPool(free, jnp.int32(0), jnp.sum(stays, dtype=jnp.int32), holders)


def release(
    pool: BlockPool,
    block_tables: Int32[Array, "S M"],
    slot: Int32[Array, " S"],
    counts: Int32[Array, " S"],
    *,
    last_first: bool,
) -> BlockPool:
    """Give back the first `counts[i]` blocks of slot `slot[i]`'s table for each i, each one's last block first.

    In order of i, or against it (`last_first`). A block with several holders is free when the last of them gives it.
    """
    size, total = pool.free.shape[0], jnp.sum(counts)

    def give_back(pool: BlockPool) -> BlockPool:
        before = total - cumsum(counts) if last_first else exclusive_cumsum(counts)
        j = jnp.arange(block_tables.shape[1])
        given = j < counts[:, None]
        turn = jnp.where(given, before[:, None] + counts[:, None] - 1 - j, given.size)
        block = jnp.where(given, block_tables.at[slot].get(mode="clip"), size)
        holders = pool.holders.at[block].add(-1, mode="drop")
        last_turn = jnp.zeros(size, jnp.int32).at[block].max(turn, mode="drop")
        is_free = given & (holders.at[block].get(mode="clip") == 0) & (last_turn.at[block].get(mode="clip") == turn)
        freed = jnp.cumsum(jnp.zeros(given.size, jnp.int32).at[turn].set(is_free.astype(jnp.int32), mode="drop"))
        place = pool.front + pool.num_free + freed.at[turn].get(mode="clip") - 1
        free = pool.free.at[jnp.where(is_free, place % size, size)].set(block, mode="drop")
        return BlockPool(free, pool.front, pool.num_free + freed[-1], holders)

    return jax.lax.cond(total > 0, give_back, lambda pool: pool, pool)


def count_first(blocks: Int32[Array, "S M"], counted: Bool[Array, "S M"], num_blocks: int) -> Int32[Array, " S"]:
    """How many of each row's `counted` blocks no row before it has."""
    row = jnp.arange(blocks.shape[0])[:, None]
    first = jnp.full(num_blocks, blocks.shape[0]).at[jnp.where(counted, blocks, num_blocks)].min(row, mode="drop")
    return jnp.sum(counted & (first.at[blocks].get(mode="clip") == row), axis=1, dtype=jnp.int32)
