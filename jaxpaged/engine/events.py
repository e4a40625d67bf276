"""What happened in a run, as arrays: a row for each step, and a log of the blocks that were handed out.

The buffer has a fixed size; the run loop ends before it would overflow. The host makes tokens, text and traces of it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine.block_pool import exclusive_cumsum
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.sample import samples
from jaxpaged.engine.schedule import Schedule, Wait
from jaxpaged.engine.state import EngineState

# Why a sequence finished.
NOT_FINISHED, STOP, LENGTH = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepEvents:
    """One step's candidates, in order. With an axis E in front of each field: the steps of a run.

    token: what was sampled, where `sampled`. num_blocks, new_blocks: blocks held, and handed out for this step.
    """

    seq: Int32[Array, " S"]
    slot: Int32[Array, " S"]
    cached: Int32[Array, " S"]
    total_len: Int32[Array, " S"]
    scheduled: Int32[Array, " S"]
    num_blocks: Int32[Array, " S"]
    new_blocks: Int32[Array, " S"]
    decodes: Bool[Array, " S"]
    admitted: Bool[Array, " S"]
    preempted: Bool[Array, " S"]
    sampled: Bool[Array, " S"]
    token: Int32[Array, " S"]
    finish: Int32[Array, " S"]
    wait: Wait
    free_blocks: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Events:
    """num_steps: rows of `steps` in use. handed_out: the blocks that were, in order; num_handed_out of them."""

    num_steps: Int32[Array, ""]
    steps: StepEvents
    handed_out: Int32[Array, " B"]
    num_handed_out: Int32[Array, ""]


def init_events(config: EngineConfig) -> Events:
    slots, steps = config.max_num_seqs, config.max_steps

    def ints(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    def flags() -> Array:
        return jnp.zeros((steps, slots), bool)

    columns = {name: ints(steps, slots) for name in ("seq", "slot", "cached", "total_len", "scheduled")}
    columns |= {name: ints(steps, slots) for name in ("num_blocks", "new_blocks", "token", "finish")}
    columns |= {name: flags() for name in ("decodes", "admitted", "preempted", "sampled")}
    wait = Wait(ints(steps), ints(steps), ints(steps), ints(steps))
    rows = StepEvents(**columns, wait=wait, free_blocks=ints(steps))
    # A block for each sequence and step, and room for one more step of any kind: see has_room.
    return Events(jnp.int32(0), rows, ints(steps * slots + _most_blocks_a_step(config)), jnp.int32(0))


def has_room(events: Events, config: EngineConfig) -> Bool[Array, ""]:
    """Whether one more step fits, whatever it does."""
    blocks_fit = events.num_handed_out + _most_blocks_a_step(config) <= events.handed_out.shape[0]
    return (events.num_steps < config.max_steps) & blocks_fit


def record(
    events: Events,
    allocated: EngineState,
    schedule: Schedule,
    token: Int32[Array, " S"],
    finish: Int32[Array, " S"],
) -> Events:
    """Write one step's row, and the blocks it handed out. `allocated` is the state before the finished left."""
    slots, new_blocks = allocated.slots, schedule.new_blocks
    slot = allocated.requests.slot[schedule.row]
    num_blocks = slots.num_blocks.at[slot].get(mode="fill", fill_value=0)
    row = StepEvents(
        seq=schedule.seq,
        slot=slot,
        cached=schedule.cached,
        total_len=schedule.total_len,
        scheduled=schedule.scheduled,
        num_blocks=num_blocks,
        new_blocks=new_blocks,
        decodes=schedule.decodes,
        admitted=schedule.admitted,
        preempted=schedule.preempted,
        sampled=samples(schedule),
        token=token,
        finish=finish,
        wait=schedule.wait,
        free_blocks=allocated.block_pool.num_free,
    )
    table = slots.block_table.at[slot].get(mode="clip")
    j = jnp.arange(table.shape[1])
    first_new = (num_blocks - new_blocks)[:, None]
    new = jnp.take_along_axis(table, jnp.clip(first_new + j, 0, table.shape[1] - 1), axis=1)
    place = events.num_handed_out + exclusive_cumsum(new_blocks)[:, None] + j
    place = jnp.where(j < new_blocks[:, None], place, events.handed_out.shape[0])
    return Events(
        events.num_steps + 1,
        jax.tree.map(lambda column, value: column.at[events.num_steps].set(value), events.steps, row),
        events.handed_out.at[place].set(new, mode="drop"),
        events.num_handed_out + jnp.sum(new_blocks),
    )


def _most_blocks_a_step(config: EngineConfig) -> int:
    return min(config.num_blocks, config.max_num_seqs * config.max_blocks)
