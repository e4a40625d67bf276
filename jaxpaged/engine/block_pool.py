"""Which blocks are free: a queue, handed out from its front and released to its back (docs/scheduler.md)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


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


def exclusive_cumsum(counts: Int32[Array, " S"]) -> Int32[Array, " S"]:
    return jnp.cumsum(counts) - counts


def take(pool: BlockPool, counts: Int32[Array, " S"], max_blocks: int) -> tuple[BlockPool, Int32[Array, "S M"]]:
    """Hand out `counts[s]` blocks to each row, in order of the rows. Entry `[s, j]` is row s's j-th, for j < counts[s].

    The caller has made sure that the sum of `counts` is free.
    """
    place = pool.front + exclusive_cumsum(counts)[:, None] + jnp.arange(max_blocks)
    size = pool.free.shape[0]
    taken = jnp.sum(counts)
    return BlockPool(pool.free, (pool.front + taken) % size, pool.num_free - taken), pool.free[place % size]


def release(pool: BlockPool, block_tables: Int32[Array, "S M"], counts: Int32[Array, " S"]) -> BlockPool:
    """Give back the first `counts[s]` blocks of each row, in order of the rows, each row's last block first."""
    size = pool.free.shape[0]
    j = jnp.arange(block_tables.shape[1])
    place = pool.front + pool.num_free + exclusive_cumsum(counts)[:, None] + counts[:, None] - 1 - j
    place = jnp.where(j < counts[:, None], place % size, size)
    free = pool.free.at[place].set(block_tables, mode="drop", unique_indices=False)
    return BlockPool(free, pool.front, pool.num_free + jnp.sum(counts))
