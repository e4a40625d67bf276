"""Carry out a schedule's decisions on slots and blocks: release the preempted, admit, hand out blocks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine import block_pool, prefix_cache
from jaxpaged.engine.block_pool import BlockPool
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.schedule import Hits, Schedule, most_new_blocks
from jaxpaged.engine.state import RUNNING, WAITING, EngineState, Requests
from jaxpaged.engine.sums import exclusive_cumsum, pick


def allocate(
    state: EngineState, schedule: Schedule, config: EngineConfig
) -> tuple[EngineState, Schedule, Int32[Array, " B"]]:
    """Slots and blocks as the schedule needs them, before the forward pass.

    Returns the state, the schedule with its requests as they are then, and the blocks handed out, in order. A step in
    which nobody comes, goes or grows skips all of it.
    """
    changes = jnp.any(schedule.preempted | schedule.admitted | (schedule.new_blocks > 0))
    # The KV pools stay outside of the conditional: nothing here concerns them.
    changed, requests, handed_out = jax.lax.cond(
        changes,
        lambda state, requests: _change(state, schedule, config),
        lambda state, requests: (state, requests, jnp.zeros(most_new_blocks(config), jnp.int32)),
        replace(state, kv=()),
        schedule.requests,
    )
    return replace(changed, kv=state.kv), replace(schedule, requests=requests), handed_out


def _change(
    state: EngineState, schedule: Schedule, config: EngineConfig
) -> tuple[EngineState, Requests, Int32[Array, " B"]]:
    """Release, then share what the prefix cache has, then hand out, so that no hit is lost to a neighbour."""
    before, admitted, new_blocks = schedule.requests, schedule.admitted, schedule.new_blocks
    released = jnp.where(schedule.preempted, before.num_blocks, 0)
    pool = block_pool.release(state.block_pool, state.block_tables, before.slot, released, last_first=True)
    requests = leave(before, schedule.preempted, WAITING, config)
    requests = replace(
        requests,
        status=jnp.where(admitted, RUNNING, requests.status),
        slot=jnp.where(admitted, _lowest_free_slots(requests), requests.slot),
        prefill_len=jnp.where(admitted, requests.total_len, requests.prefill_len),
    )
    tables, cache = state.block_tables, state.prefix_cache
    if schedule.hits is not None:
        pool, tables, requests = _share(pool, tables, requests, schedule.hits, admitted, config)
    requests = replace(requests, num_blocks=requests.num_blocks + new_blocks)
    pool, handed_out = block_pool.take(pool, jnp.sum(new_blocks), most_new_blocks(config))
    tables = _append(tables, requests, new_blocks, handed_out)
    cache = cache and prefix_cache.forget(cache, handed_out)
    return replace(state, block_tables=tables, block_pool=pool, prefix_cache=cache), requests, handed_out


def _share(
    pool: BlockPool,
    tables: Int32[Array, "S M"],
    requests: Requests,
    hits: Hits,
    admitted: Bool[Array, " S"],
    config: EngineConfig,
) -> tuple[BlockPool, Int32[Array, "S M"], Requests]:
    """The admitted hold what the prefix cache has of them, and need not compute it."""
    count = jnp.where(admitted, hits.count, 0)

    def share(pool: BlockPool, tables: Int32[Array, "S M"]) -> tuple[BlockPool, Int32[Array, "S M"]]:
        j = jnp.arange(tables.shape[1])
        shared = j < count[:, None]
        slot = jnp.where(shared, requests.slot[:, None], config.max_num_seqs)
        return block_pool.share(pool, hits.blocks, shared), tables.at[slot, j].set(hits.blocks, mode="drop")

    pool, tables = jax.lax.cond(jnp.any(count > 0), share, lambda *same: same, pool, tables)
    return (
        pool,
        tables,
        replace(requests, cached=requests.cached + count * config.block_size, num_blocks=requests.num_blocks + count),
    )


def leave(requests: Requests, leaves: Bool[Array, " S"], status: int, config: EngineConfig) -> Requests:
    """Those that leave have neither slot nor blocks, and nothing cached."""
    return replace(
        requests,
        status=jnp.where(leaves, status, requests.status),
        slot=jnp.where(leaves, config.max_num_seqs, requests.slot),
        num_blocks=jnp.where(leaves, 0, requests.num_blocks),
        cached=jnp.where(leaves, 0, requests.cached),
    )


def _lowest_free_slots(requests: Requests) -> Int32[Array, " S"]:
    """The first candidate that does not run gets the lowest slot that nobody has, and so on."""
    slot = jnp.arange(requests.slot.shape[0])
    free_up_to = slot + 1 - jnp.sum(requests.slot <= slot[:, None], axis=1)
    num_running = jnp.sum(requests.status == RUNNING)
    return jnp.sum(num_running + free_up_to <= slot[:, None], axis=1, dtype=jnp.int32)


def _append(
    block_tables: Int32[Array, "S M"],
    requests: Requests,
    new_blocks: Int32[Array, " S"],
    handed_out: Int32[Array, " B"],
) -> Int32[Array, "S M"]:
    """Each candidate's new blocks at the end of its table. Decodes come before admissions: running ones are first."""
    num_slots, max_blocks = block_tables.shape
    first = exclusive_cumsum(new_blocks)
    end_of_table = requests.slot * max_blocks + requests.num_blocks - new_blocks
    i = jnp.arange(handed_out.shape[0])
    its = (first <= i[:, None]) & (i[:, None] < first + new_blocks)
    # Places of all tables are counted through; those behind the last one are nobody's.
    nobodys = num_slots * max_blocks
    place = i + nobodys + pick(its, end_of_table - first - nobodys)
    return block_tables.at[place // max_blocks, place % max_blocks].set(handed_out, mode="drop")
