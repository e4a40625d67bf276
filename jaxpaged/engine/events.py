"""What happened in a run, as arrays: a row for each step, and a log of the blocks that were handed out.

The buffer has a fixed size; the run loop ends before it would overflow. The host makes tokens, text and traces of it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine.columns import num_columns, pack, unpack
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.sample import samples
from jaxpaged.engine.schedule import Schedule, Wait, most_new_blocks

# Why a sequence finished.
NOT_FINISHED, STOP, LENGTH = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """One step's candidates, in order. With an axis E in front of each field: those of a run's steps.

    token: what was sampled, where `sampled`. num_blocks, new_blocks: blocks held, and handed out for this step.
    hit_block: of one admitted with `cached` tokens, the block that holds the last of them.
    """

    seq: Int32[Array, "*E S"]
    slot: Int32[Array, "*E S"]
    cached: Int32[Array, "*E S"]
    total_len: Int32[Array, "*E S"]
    scheduled: Int32[Array, "*E S"]
    num_blocks: Int32[Array, "*E S"]
    new_blocks: Int32[Array, "*E S"]
    hit_block: Int32[Array, "*E S"]
    decodes: Bool[Array, "*E S"]
    admitted: Bool[Array, "*E S"]
    preempted: Bool[Array, "*E S"]
    sampled: Bool[Array, "*E S"]
    token: Int32[Array, "*E S"]
    finish: Int32[Array, "*E S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Events:
    """num_steps: steps in use, of E. handed_out: the blocks that were, in order; num_handed_out of them.

    candidate_rows, wait_rows: each step's candidates and the first that waits, packed.
    """

    num_steps: Int32[Array, ""]
    candidate_rows: Int32[Array, "C E S"]
    wait_rows: Int32[Array, "W E"]
    handed_out: Int32[Array, " B"]
    num_handed_out: Int32[Array, ""]

    @property
    def steps(self) -> Candidates:
        """Each step's candidates, by name; on the host, too."""
        return unpack(Candidates, self.candidate_rows, axis=-3)

    @property
    def waits(self) -> Wait:
        """The first that waits in each step; on the host, too."""
        return unpack(Wait, self.wait_rows, axis=-2)


def init_events(config: EngineConfig) -> Events:
    slots, steps = config.max_num_seqs, config.max_steps

    def zeros(*shape: int) -> Int32[Array, "..."]:
        return jnp.zeros(shape, jnp.int32)

    return Events(
        num_steps=zeros(),
        candidate_rows=zeros(num_columns(Candidates), steps, slots),
        wait_rows=zeros(num_columns(Wait), steps),
        # A block for each sequence and step, and room for one more step of any kind: see has_room.
        handed_out=zeros(steps * slots + most_new_blocks(config)),
        num_handed_out=zeros(),
    )


def has_room(events: Events, config: EngineConfig) -> Bool[Array, ""]:
    """Whether one more step fits, whatever it does."""
    blocks_fit = events.num_handed_out + most_new_blocks(config) <= events.handed_out.shape[0]
    return (events.num_steps < config.max_steps) & blocks_fit


def record(
    events: Events,
    schedule: Schedule,
    handed_out: Int32[Array, " B"],
    token: Int32[Array, " S"],
    finish: Int32[Array, " S"],
) -> Events:
    """Write one step's row, and the blocks it handed out. The requests are shown as they were before they ran."""
    requests, hits = schedule.requests, schedule.hits
    candidates = Candidates(
        seq=requests.seq,
        slot=requests.slot,
        cached=requests.cached,
        total_len=requests.total_len,
        scheduled=schedule.scheduled,
        num_blocks=requests.num_blocks,
        new_blocks=schedule.new_blocks,
        hit_block=jnp.zeros_like(requests.seq) if hits is None else hits.last,
        decodes=schedule.decodes,
        admitted=schedule.admitted,
        preempted=schedule.preempted,
        sampled=samples(schedule),
        token=token,
        finish=finish,
    )
    put, step = jax.lax.dynamic_update_index_in_dim, events.num_steps
    return Events(
        step + 1,
        put(events.candidate_rows, pack(candidates, axis=-2), step, 1),
        put(events.wait_rows, pack(schedule.wait, axis=-1), step, 1),
        # What stands behind the new blocks is overwritten by the next step.
        jax.lax.dynamic_update_slice(events.handed_out, handed_out, (events.num_handed_out,)),
        events.num_handed_out + jnp.sum(schedule.new_blocks),
    )
