"""Carry out a schedule's decisions on slots and blocks: release the preempted, admit, hand out blocks."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine import block_pool
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.state import RUNNING, WAITING, EngineState, Requests, Slots


def allocate(state: EngineState, schedule: Schedule, config: EngineConfig) -> EngineState:
    """Slots and blocks as the schedule needs them, before the forward pass."""
    state = release(state, schedule.row[::-1], schedule.preempted[::-1], WAITING)
    requests, slots = state.requests, state.slots
    slot = jnp.where(
        schedule.admitted,
        _lowest_free_slots(slots)[jnp.maximum(jnp.cumsum(schedule.admitted) - 1, 0)],
        requests.slot[schedule.row],
    )
    pool, slots = _hand_out(state.block_pool, slots, slot, schedule)
    return replace(state, requests=_admit(requests, schedule, slot), slots=slots, block_pool=pool)


def release(state: EngineState, row: Int32[Array, " S"], leaves: Bool[Array, " S"], status: int) -> EngineState:
    """Take slot and blocks from the sequences that leave, in the order given, and set their status."""
    requests, slots = state.requests, state.slots
    no_slot = slots.num_blocks.shape[0]
    slot = jnp.where(leaves, requests.slot[row], no_slot)
    counts = slots.num_blocks.at[slot].get(mode="fill", fill_value=0)
    tables = slots.block_table.at[slot].get(mode="clip")
    pool = block_pool.release(state.block_pool, tables, counts)
    row = jnp.where(leaves, row, requests.seq.shape[0])
    requests = replace(
        requests,
        status=requests.status.at[row].set(status, mode="drop"),
        slot=requests.slot.at[row].set(no_slot, mode="drop"),
        cached=requests.cached.at[row].set(0, mode="drop"),
    )
    return replace(
        state,
        requests=requests,
        slots=replace(slots, num_blocks=slots.num_blocks.at[slot].set(0, mode="drop")),
        block_pool=pool,
    )


def _lowest_free_slots(slots: Slots) -> Int32[Array, " S"]:
    """Free slots, lowest first; the rest of the list has no meaning."""
    return jnp.nonzero(slots.num_blocks == 0, size=slots.num_blocks.shape[0], fill_value=0)[0].astype(jnp.int32)


def _hand_out(
    pool: block_pool.BlockPool, slots: Slots, slot: Int32[Array, " S"], schedule: Schedule
) -> tuple[block_pool.BlockPool, Slots]:
    """Give each candidate its new blocks. Decodes come before admissions: running ones are first in order."""
    max_blocks = slots.block_table.shape[1]
    pool, taken = block_pool.take(pool, schedule.new_blocks, max_blocks)
    held = slots.num_blocks.at[slot].get(mode="fill", fill_value=0)
    j = jnp.arange(max_blocks)
    place = jnp.where(j < schedule.new_blocks[:, None], held[:, None] + j, max_blocks)
    return pool, Slots(
        block_table=slots.block_table.at[slot[:, None], place].set(taken, mode="drop"),
        num_blocks=slots.num_blocks.at[slot].add(schedule.new_blocks, mode="drop"),
    )


def _admit(requests: Requests, schedule: Schedule, slot: Int32[Array, " S"]) -> Requests:
    row = jnp.where(schedule.admitted, schedule.row, requests.seq.shape[0])
    return replace(
        requests,
        status=requests.status.at[row].set(RUNNING, mode="drop"),
        slot=requests.slot.at[row].set(slot, mode="drop"),
        prefill_len=requests.prefill_len.at[row].set(schedule.total_len, mode="drop"),
    )
