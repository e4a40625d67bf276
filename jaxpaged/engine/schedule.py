"""Decide a step: who runs, with how many tokens; who is admitted, who is preempted, and why the next one waits.

The rules are in docs/scheduler.md. All decisions are sums along the candidates in order; the state is only read.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.state import EMPTY, RUNNING, WAITING, EngineState, Requests
from jaxpaged.engine.sums import cumsum, cumsums

# Why the first waiting request was not admitted.
NOBODY_WAITS, NO_SLOTS, NO_BLOCKS, NO_TOKENS = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Wait:
    """The first request that stays in the queue, and what it lacks: it needs `needs` of what `free` are free of.

    free_blocks: those after all that this step hands out.
    """

    seq: Int32[Array, " *N"]
    reason: Int32[Array, " *N"]
    needs: Int32[Array, " *N"]
    free: Int32[Array, " *N"]
    free_blocks: Int32[Array, " *N"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """One step's decisions for its S candidates: the running sequences in order, then the first waiting ones.

    row: the candidate's row in the request table. requests: as they are at the moment; `commit` writes them back.
    scheduled: tokens it consumes in this step; 0 if it does not run. decodes: whether it decodes (else it prefills).
    new_blocks: blocks it is handed.
    """

    row: Int32[Array, " S"]
    requests: Requests
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
    released: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Prefills:
    scheduled: Int32[Array, " S"]
    admitted: Bool[Array, " S"]


def make_schedule(state: EngineState, config: EngineConfig) -> Schedule:
    free_blocks = state.block_pool.num_free
    num_slots, budget = config.max_num_seqs, jnp.int32(config.max_num_batched_tokens)

    in_order = _queue_order(state.requests.columns)
    row = in_order[:num_slots]
    requests = state.requests[row]
    running, waiting = requests.status == RUNNING, requests.status == WAITING
    prefills = running & (requests.cached < requests.prefill_len)
    held, need = requests.num_blocks, config.blocks_for(requests.total_len)

    chosen = running & ~prefills
    if num_slots > config.max_num_batched_tokens:  # else there is a token for every decode
        chosen &= cumsum(chosen) <= budget
    grows_by = jnp.where(chosen, need - held, 0)
    wants = jnp.where(prefills | waiting, requests.total_len - requests.cached, 0)
    # Whom a decision leaves out stands behind all whom it takes, so these sums hold before anything is decided.
    blocks_run, blocks_admit, tokens = cumsums(held + grows_by, jnp.where(waiting, need, 0), wants)

    def plan_decodes() -> _Decodes:
        # Keeping the first m running sequences works if what they need is free once all the others have released.
        # That is monotone in m, so the sequences that can be kept are those up to the largest m.
        kept = running & (blocks_run <= free_blocks + jnp.sum(held))
        preempted = running & ~kept
        released = jnp.sum(jnp.where(preempted, held, 0))
        return _Decodes(chosen & kept, preempted, jnp.where(kept, grows_by, 0), released)

    def plan_prefills(budget: Array, free_blocks: Array, may_admit: Array, preempted: Array) -> _Prefills:
        budget_left = jnp.maximum(budget - (tokens - wants), 0)
        # A free slot is certain: candidates are as many as slots, and the running ones come first. Both sums only
        # grow, so behind the first that does not fit nobody does.
        admitted = waiting & may_admit & (blocks_admit <= free_blocks) & (budget_left > 0)
        takes_part = (running & ~preempted) | admitted
        return _Prefills(jnp.where(takes_part, jnp.minimum(wants, budget_left), 0), admitted)

    decodes = plan_decodes()
    if config.schedule == "prefill_first":
        prefill = plan_prefills(budget, free_blocks, jnp.bool_(True), jnp.zeros_like(running))
        decodes = jax.tree.map(lambda x: jnp.where(jnp.any(prefill.scheduled > 0), jnp.zeros_like(x), x), decodes)
    else:
        prefill = plan_prefills(
            budget - jnp.sum(decodes.scheduled),
            free_blocks - jnp.sum(decodes.new_blocks),
            decodes.released == 0,
            decodes.preempted,
        )

    scheduled = decodes.scheduled + prefill.scheduled
    new_blocks = decodes.new_blocks + jnp.where(prefill.admitted, need, 0)
    holds_slot = (running & ~decodes.preempted) | prefill.admitted
    wait = _first_wait(
        # The queue behind the running sequences that stay; a preempted one stands at its front.
        state.requests[in_order.at[jnp.sum(holds_slot)].get(mode="promise_in_bounds")],
        free_slots=num_slots - jnp.sum(holds_slot),
        free_blocks=free_blocks + decodes.released - jnp.sum(new_blocks),
        free_tokens=budget - jnp.sum(scheduled),
        config=config,
    )
    return Schedule(
        row=row,
        requests=requests,
        scheduled=scheduled,
        decodes=decodes.scheduled,
        admitted=prefill.admitted,
        preempted=decodes.preempted,
        new_blocks=new_blocks,
        wait=wait,
    )


def _queue_order(requests: Requests) -> Int32[Array, " R"]:
    """Rows in order: running, then waiting, then empty ones; each by ID."""
    rows = jnp.arange(requests.seq.shape[0], dtype=jnp.int32)
    _, _, in_order = jax.lax.sort((-requests.status, requests.seq, rows), num_keys=2)
    return in_order


def _first_wait(
    first: Requests, free_slots: Array, free_blocks: Array, free_tokens: Array, config: EngineConfig
) -> Wait:
    need = config.blocks_for(first.total_len)
    # In this order; the last line holds when all others failed.
    reason, needs, free = jnp.int32(NO_TOKENS), first.total_len, free_tokens
    for lacks, code, its_needs, its_free in (
        (need > free_blocks, NO_BLOCKS, need, free_blocks),
        (free_slots < 1, NO_SLOTS, jnp.int32(1), free_slots),
        (first.status == EMPTY, NOBODY_WAITS, jnp.int32(0), jnp.int32(0)),
    ):
        reason = jnp.where(lacks, code, reason)
        needs = jnp.where(lacks, its_needs, needs)
        free = jnp.where(lacks, its_free, free)
    return Wait(first.seq, reason, needs, free, free_blocks)


def most_new_blocks(config: EngineConfig) -> int:
    """The most blocks that one step hands out, by the rules.

    One for a decode. An admitted sequence gets all it needs at once, but only the last of them can need more than the
    budget pays for; what the others need is the budget's tokens in blocks, each part full at most once.
    """
    budget = config.max_num_batched_tokens // config.block_size
    return min(config.num_blocks, config.max_num_seqs + budget + config.max_blocks)
