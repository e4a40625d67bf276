"""Decide a step: who runs, with how many tokens; who is admitted, who is preempted, and why the next one waits.

The rules are in docs/scheduler.md. All decisions are sums along the candidates in order; the state is only read.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine.block_pool import count_first
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.prefix_cache import look_up
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
class Hits:
    """What the prefix cache holds of each waiting candidate's beginning: its first `count` blocks are `blocks`.

    last: the last of them. taken: how many of them are free, and not taken by a candidate before it.
    """

    count: Int32[Array, " S"]
    blocks: Int32[Array, "S M"]
    last: Int32[Array, " S"]
    taken: Int32[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """One step's decisions for its S candidates: the running sequences in order, then the first waiting ones.

    row: the candidate's row in the request table. requests: as they are at the moment; `commit` writes them back.
    scheduled: tokens it consumes in this step; 0 if it does not run. decodes: whether it decodes (else it prefills).
    new_blocks: blocks it is handed. hits: those that it shares instead, if it is admitted; None without prefix cache.
    """

    row: Int32[Array, " S"]
    requests: Requests
    scheduled: Int32[Array, " S"]
    decodes: Bool[Array, " S"]
    admitted: Bool[Array, " S"]
    preempted: Bool[Array, " S"]
    new_blocks: Int32[Array, " S"]
    hits: Hits | None
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
    hits, held_alone = _sharing(state, row, requests, jnp.sum(grows_by), config)
    hit = 0 if hits is None else hits.count

    wants = jnp.where(prefills | waiting, requests.total_len - requests.cached - hit * config.block_size, 0)
    new_if_admitted = need - hit
    needs = new_if_admitted + (0 if hits is None else hits.taken)
    # Whom a decision leaves out stands behind all whom it takes, so these sums hold before anything is decided.
    blocks_run, blocks_admit, tokens = cumsums(held_alone + grows_by, jnp.where(waiting, needs, 0), wants)

    def plan_decodes() -> _Decodes:
        # Keeping the first m running sequences works if what they need is free once all the others have released.
        # That is monotone in m, so the sequences that can be kept are those up to the largest m.
        kept = running & (blocks_run <= free_blocks + jnp.sum(held_alone))
        preempted = running & ~kept
        released = jnp.sum(jnp.where(preempted, held_alone, 0))
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
            ~jnp.any(decodes.preempted),
            decodes.preempted,
        )

    scheduled = decodes.scheduled + prefill.scheduled
    new_blocks = decodes.new_blocks + jnp.where(prefill.admitted, new_if_admitted, 0)
    taken = new_blocks if hits is None else new_blocks + jnp.where(prefill.admitted, hits.taken, 0)
    holds_slot = (running & ~decodes.preempted) | prefill.admitted
    # The queue behind the running sequences that stay; a preempted one stands at its front.
    first = jnp.sum(holds_slot)
    is_first = jnp.arange(num_slots) == first  # if it is no candidate, it lacks a slot, and nobody asks for more
    wait = _first_wait(
        state.requests[in_order.at[first].get(mode="promise_in_bounds")],
        needs_blocks=jnp.sum(jnp.where(is_first, jnp.where(waiting, needs, need), 0)),
        needs_tokens=jnp.sum(jnp.where(is_first, jnp.where(waiting, wants, requests.total_len), 0)),
        free_slots=num_slots - first,
        free_blocks=free_blocks + decodes.released - jnp.sum(taken),
        free_tokens=budget - jnp.sum(scheduled),
    )
    return Schedule(
        row=row,
        requests=requests,
        scheduled=scheduled,
        decodes=decodes.scheduled,
        admitted=prefill.admitted,
        preempted=decodes.preempted,
        new_blocks=new_blocks,
        hits=hits,
        wait=wait,
    )


def _queue_order(requests: Requests) -> Int32[Array, " R"]:
    """Rows in order: running, then waiting, then empty ones; each by ID."""
    rows = jnp.arange(requests.seq.shape[0], dtype=jnp.int32)
    _, _, in_order = jax.lax.sort((-requests.status, requests.seq, rows), num_keys=2)
    return in_order


def _sharing(
    state: EngineState, row: Int32[Array, " S"], requests: Requests, grows_by: Int32[Array, ""], config: EngineConfig
) -> tuple[Hits | None, Int32[Array, " S"]]:
    """What the waiting candidates could share; and of each running one's blocks those that none before it holds.

    Looked at only where somebody waits, or may have to be preempted; else all of the blocks count as its own.
    """
    cache, pool, held = state.prefix_cache, state.block_pool, requests.num_blocks
    if cache is None:
        return None, held
    waiting, j = requests.status == WAITING, jnp.arange(config.max_blocks)

    def look() -> tuple[Hits, Int32[Array, " S"]]:
        tokens = state.requests.tokens.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False)
        count, blocks = look_up(cache, tokens, requests.total_len, requests.cache_salt, config)
        count = jnp.where(waiting, count, 0)
        last = jnp.take_along_axis(blocks, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        is_free = (j < count[:, None]) & (pool.holders[blocks] == 0)
        alone = count_first(state.tables_of(requests, config), j < held[:, None], config.num_blocks)
        return Hits(count, blocks, last, count_first(blocks, is_free, config.num_blocks)), alone

    def do_not_look() -> tuple[Hits, Int32[Array, " S"]]:
        none = jnp.zeros_like(row)
        return Hits(none, jnp.zeros_like(state.block_tables), none, none), held

    return jax.lax.cond(jnp.any(waiting) | (grows_by > pool.num_free), look, do_not_look)


def _first_wait(
    first: Requests, needs_blocks: Array, needs_tokens: Array, free_slots: Array, free_blocks: Array, free_tokens: Array
) -> Wait:
    # In this order; the last line holds when all others failed.
    reason, needs, free = jnp.int32(NO_TOKENS), needs_tokens, free_tokens
    for lacks, code, its_needs, its_free in (
        (needs_blocks > free_blocks, NO_BLOCKS, needs_blocks, free_blocks),
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
