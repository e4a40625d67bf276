"""Which blocks are free: a queue, handed out from its front and released to its back (docs/scheduler.md)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxpaged.engine.sums import cumsum, exclusive_cumsum


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPool:
    """The free blocks are `free[(front + i) % N]` for i < num_free. The rest of the ring is stale."""

    free: Int32[Array, " N"]
    front: Int32[Array, ""]
    num_free: Int32[Array, ""]


def init_block_pool(num_blocks: int) -> BlockPool:
    """A fresh pool: blocks 0, 1, 2, ... are free, in this order."""
    return BlockPool(jnp.arange(num_blocks, dtype=jnp.int32), jnp.int32(0), jnp.int32(num_blocks))


def take(pool: BlockPool, count: Int32[Array, ""], most: int) -> tuple[BlockPool, Int32[Array, " most"]]:
    """Hand out `count` blocks: the first so many entries of what is returned. They must be free."""
    size = pool.free.shape[0]
    place = (pool.front + jnp.arange(most)) % size
    taken = pool.free.at[place].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return BlockPool(pool.free, (pool.front + count) % size, pool.num_free - count), taken


def release(
    pool: BlockPool,
    block_tables: Int32[Array, "S M"],
    slot: Int32[Array, " S"],
    counts: Int32[Array, " S"],
    *,
    last_first: bool,
) -> BlockPool:
    """Give back the first `counts[i]` blocks of slot `slot[i]`'s table for each i, each one's last block first.

    In order of i, or against it (`last_first`).
    """
    size, total = pool.free.shape[0], jnp.sum(counts)

    def give_back() -> Int32[Array, " N"]:
        before = total - cumsum(counts) if last_first else exclusive_cumsum(counts)
        j = jnp.arange(block_tables.shape[1])
        place = pool.front + pool.num_free + before[:, None] + counts[:, None] - 1 - j
        place = jnp.where(j < counts[:, None], place % size, size)
        return pool.free.at[place].set(block_tables.at[slot].get(mode="clip"), mode="drop")

    free = jax.lax.cond(total > 0, give_back, lambda: pool.free)
    return BlockPool(free, pool.front, pool.num_free + total)
