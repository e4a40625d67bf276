"""One engine step: schedule, allocate, forward, sample, commit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxpaged.engine.allocate import allocate
from jaxpaged.engine.commit import commit
from jaxpaged.engine.config import Bucket, EngineConfig
from jaxpaged.engine.events import Events, StepEvents, record
from jaxpaged.engine.forward import forward, pick_bucket
from jaxpaged.engine.sample import sample
from jaxpaged.engine.schedule import Schedule, make_schedule
from jaxpaged.engine.state import EngineState
from kernels_pallas.paged_attention import KVPool


class NextTokens(Protocol):
    """What a step needs of a model: the token after each candidate that is done with its input, and the pools, written."""

    def __call__(self, state: EngineState, schedule: Schedule) -> tuple[Int32[Array, " S"], tuple[KVPool, ...]]: ...


def step(next_tokens: NextTokens, state: EngineState, events: Events, config: EngineConfig) -> tuple[EngineState, Events]:
    schedule = make_schedule(state, config)
    state = allocated = allocate(state, schedule, config)
    token, kv = next_tokens(state, schedule)
    state, sampled, finish = commit(replace(state, kv=kv), schedule, token)
    slot = allocated.requests.slot[schedule.row]
    row = StepEvents(
        seq=schedule.seq,
        slot=slot,
        cached=schedule.cached,
        total_len=schedule.total_len,
        scheduled=schedule.scheduled,
        num_blocks=allocated.slots.num_blocks.at[slot].get(mode="fill", fill_value=0),
        new_blocks=schedule.new_blocks,
        decodes=schedule.decodes,
        admitted=schedule.admitted,
        preempted=schedule.preempted,
        sampled=sampled,
        token=token,
        finish=finish,
        wait=schedule.wait,
        free_blocks=allocated.block_pool.num_free,
    )
    return state, record(events, row, allocated, schedule)


def next_tokens_of(model: nnx.Module, config: EngineConfig) -> NextTokens:
    """Forward and sample, in the smallest bucket that the step fits in."""

    def in_bucket(bucket: Bucket) -> Callable[[EngineState, Schedule], tuple[Array, tuple[KVPool, ...]]]:
        def run_bucket(state: EngineState, schedule: Schedule) -> tuple[Array, tuple[KVPool, ...]]:
            logits, candidate, kv = forward(model, state, schedule, bucket, config)
            return _sample_candidates(logits, candidate, state, schedule), kv

        return run_bucket

    branches = [in_bucket(bucket) for bucket in config.buckets]

    def next_tokens(state: EngineState, schedule: Schedule) -> tuple[Array, tuple[KVPool, ...]]:
        return jax.lax.switch(pick_bucket(schedule, config), branches, state, schedule)

    return next_tokens


def _sample_candidates(
    logits: Float[Array, "N V"], candidate: Int32[Array, " N"], state: EngineState, schedule: Schedule
) -> Int32[Array, " S"]:
    requests = state.requests
    row = schedule.row.at[candidate].get(mode="fill", fill_value=0)
    is_real = candidate < schedule.row.shape[0]
    token = sample(
        logits,
        jnp.where(is_real, requests.temperature[row], 0),
        requests.seed[row],
        requests.total_len[row] - requests.prompt_len[row],
    )
    return jnp.zeros_like(schedule.row).at[candidate].set(token, mode="drop")
