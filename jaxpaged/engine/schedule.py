"""Decide a step: who runs, with how many tokens; who is admitted, who is preempted, and why the next one waits.

The rules are in docs/scheduler.md. All decisions are sums along the candidates in order; the state is only read.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine.block_pool import exclusive_cumsum
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.state import EMPTY, RUNNING, WAITING, EngineState

# Why the first waiting request was not admitted.
NOBODY_WAITS, NO_SLOTS, NO_BLOCKS, NO_TOKENS = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Wait:
    """The first request that stays in the queue, and what it lacks: it needs `needs` of what `free` are free of."""

    seq: Int32[Array, ""]
    reason: Int32[Array, ""]
    needs: Int32[Array, ""]
    free: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """One step's decisions for its S candidates: the running sequences in order, then the first waiting ones.

    row: the candidate's row in the request table. scheduled: tokens it consumes in this step; 0 if it does not run.
    decodes: whether it decodes (else it prefills). new_blocks: blocks it is handed. cached, total_len: before the step.
    """

    row: Int32[Array, " S"]
    seq: Int32[Array, " S"]
    cached: Int32[Array, " S"]
    total_len: Int32[Array, " S"]
    scheduled: Int32[Array, " S"]
    decodes: Bool[Array, " S"]
    admitted: Bool[Array, " S"]
    preempted: Bool[Array, " S"]
    new_blocks: Int32[Array, " S"]
    wait: Wait


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Decodes:
    scheduled: Bool[Array, " S"]
    preempted: Bool[Array, " S"]
    new_blocks: Int32[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Prefills:
    scheduled: Int32[Array, " S"]
    admitted: Bool[Array, " S"]


def make_schedule(state: EngineState, config: EngineConfig) -> Schedule:
    requests, slots, free_blocks = state.requests, state.slots, state.block_pool.num_free
    num_slots, budget = config.max_num_seqs, jnp.int32(config.max_num_batched_tokens)

    in_order = _queue_order(requests.status, requests.seq)
    row = in_order[:num_slots]
    status = requests.status[row]
    running, waiting = status == RUNNING, status == WAITING
    cached, total_len = requests.cached[row], requests.total_len[row]
    prefills = running & (cached < requests.prefill_len[row])
    held = jnp.where(running, slots.num_blocks.at[requests.slot[row]].get(mode="fill", fill_value=0), 0)
    need = config.blocks_for(total_len)

    def plan_decodes() -> _Decodes:
        decodes = running & ~prefills
        chosen = decodes & (jnp.cumsum(decodes) <= budget)
        new_blocks = jnp.where(chosen, need - held, 0)
        # Keeping the first m running sequences works if what they need is free once all the others have released.
        # That is monotone in m, so counting the sequences that can be kept finds the largest m.
        free_if_last = free_blocks + jnp.sum(held) - jnp.cumsum(held)
        kept = running & (jnp.cumsum(new_blocks) <= free_if_last)
        return _Decodes(chosen & kept, running & ~kept, jnp.where(kept, new_blocks, 0))

    def plan_prefills(budget: Array, free_blocks: Array, may_admit: Array, stays: Array) -> _Prefills:
        wants = jnp.where((prefills & stays) | waiting, total_len - cached, 0)
        budget_left = jnp.maximum(budget - exclusive_cumsum(wants), 0)
        blocks_fit = jnp.cumsum(jnp.where(waiting, need, 0)) <= free_blocks
        # A free slot is certain: candidates are as many as slots, and the running ones come first.
        fits = ~waiting | (blocks_fit & (budget_left > 0) & may_admit)
        admitted = waiting & jnp.cumprod(fits).astype(bool)
        return _Prefills(jnp.where(~waiting | admitted, jnp.minimum(wants, budget_left), 0), admitted)

    decodes = plan_decodes()
    if config.schedule == "prefill_first":
        prefill = plan_prefills(budget, free_blocks, jnp.bool_(True), running)
        decodes = jax.tree.map(lambda x: jnp.where(jnp.any(prefill.scheduled > 0), jnp.zeros_like(x), x), decodes)
    else:
        prefill = plan_prefills(
            budget - jnp.sum(decodes.scheduled),
            free_blocks - jnp.sum(decodes.new_blocks),
            ~jnp.any(decodes.preempted),
            running & ~decodes.preempted,
        )

    scheduled = decodes.scheduled + prefill.scheduled
    new_blocks = decodes.new_blocks + jnp.where(prefill.admitted, need, 0)
    released = jnp.sum(jnp.where(decodes.preempted, held, 0))
    holds_slot = (running & ~decodes.preempted) | prefill.admitted
    wait = _first_wait(
        state,
        # The queue behind the running sequences that stay; a preempted one stands at its front.
        jnp.take(in_order, jnp.sum(holds_slot), mode="clip"),
        free_slots=num_slots - jnp.sum(holds_slot),
        free_blocks=free_blocks + released - jnp.sum(new_blocks),
        free_tokens=budget - jnp.sum(scheduled),
        config=config,
    )
    return Schedule(
        row=row,
        seq=requests.seq[row],
        cached=cached,
        total_len=total_len,
        scheduled=scheduled,
        decodes=decodes.scheduled,
        admitted=prefill.admitted,
        preempted=decodes.preempted,
        new_blocks=new_blocks,
        wait=wait,
    )


def _queue_order(status: Int32[Array, " R"], seq: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """Rows in order: running, then waiting, then empty ones; each by ID."""
    place = jnp.where(status == RUNNING, 0, jnp.where(status == WAITING, 1, 2))
    rows = jnp.arange(status.shape[0], dtype=jnp.int32)
    _, _, in_order = jax.lax.sort((place, seq, rows), num_keys=2)
    return in_order


def _first_wait(
    state: EngineState, row: Array, free_slots: Array, free_blocks: Array, free_tokens: Array, config: EngineConfig
) -> Wait:
    requests = state.requests
    total_len = requests.total_len[row]
    need = config.blocks_for(total_len)
    # In this order; the last line holds when all others failed.
    reason, needs, free = jnp.int32(NO_TOKENS), total_len, free_tokens
    for lacks, code, its_needs, its_free in (
        (need > free_blocks, NO_BLOCKS, need, free_blocks),
        (free_slots < 1, NO_SLOTS, jnp.int32(1), free_slots),
        (requests.status[row] == EMPTY, NOBODY_WAITS, jnp.int32(0), jnp.int32(0)),
    ):
        reason = jnp.where(lacks, code, reason)
        needs = jnp.where(lacks, its_needs, needs)
        free = jnp.where(lacks, its_free, free)
    return Wait(requests.seq[row], reason, needs, free)
