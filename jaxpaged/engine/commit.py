"""Enter a step's results: what was consumed, the new tokens, and who has finished and leaves."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxpaged.engine.allocate import release
from jaxpaged.engine.events import LENGTH, NOT_FINISHED, STOP
from jaxpaged.engine.sample import samples
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.state import EMPTY, EngineState


def commit(state: EngineState, schedule: Schedule, token: Int32[Array, " S"]) -> tuple[EngineState, Int32[Array, " S"]]:
    """Enter `token` for the candidates that sample. Returns the state, and why those that finished did."""
    requests, row = state.requests, schedule.row
    sampled = samples(schedule)
    total_len = schedule.total_len + sampled
    stops = sampled & jnp.any(token[:, None] == requests.stop_ids[row], axis=1)
    is_full = sampled & (total_len >= requests.max_total_len[row])
    finish = jnp.where(stops, STOP, jnp.where(is_full, LENGTH, NOT_FINISHED))

    # Only rows that ran are written: a preempted one keeps what `allocate` has set.
    ran = jnp.where(schedule.scheduled > 0, row, requests.seq.shape[0])
    end = jnp.where(sampled, schedule.total_len, requests.tokens.shape[1])
    requests = replace(
        requests,
        cached=requests.cached.at[ran].set(schedule.cached + schedule.scheduled, mode="drop"),
        total_len=requests.total_len.at[ran].set(total_len, mode="drop"),
        tokens=requests.tokens.at[ran, end].set(token, mode="drop"),
    )
    state = release(replace(state, requests=requests), row, finish != NOT_FINISHED, EMPTY)
    return state, finish
