"""Enter a step's results: what was consumed, the new tokens, and who has finished and leaves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxpaged.engine import block_pool, prefix_cache
from jaxpaged.engine.allocate import leave
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.events import LENGTH, NOT_FINISHED, STOP
from jaxpaged.engine.prefix_cache import PrefixCache
from jaxpaged.engine.sample import samples
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.state import EMPTY, EngineState


def commit(
    state: EngineState, schedule: Schedule, token: Int32[Array, " S"], config: EngineConfig
) -> tuple[EngineState, Int32[Array, " S"]]:
    """Enter `token` for the candidates that sample. Returns the state, and why those that finished did."""
    table, before = state.requests, schedule.requests
    sampled = samples(schedule)
    total_len = before.total_len + sampled
    stop_ids = table.stop_ids.at[schedule.row].get(mode="promise_in_bounds", wrap_negative_indices=False)
    stops = sampled & jnp.any(token[:, None] == stop_ids, axis=1)
    is_full = sampled & (total_len >= before.max_total_len)
    finish = jnp.where(stops, STOP, jnp.where(is_full, LENGTH, NOT_FINISHED))
    finished = finish != NOT_FINISHED

    cache = state.prefix_cache
    if cache is not None:
        cache = _register(cache, state, schedule, config)
    released = jnp.where(finished, before.num_blocks, 0)
    pool = block_pool.release(state.block_pool, state.block_tables, before.slot, released, last_first=False)
    after = replace(before, cached=before.cached + schedule.scheduled, total_len=total_len)
    table = table.write(schedule.row, leave(after, finished, EMPTY, config))
    end = jnp.where(sampled, before.total_len, config.max_model_len)
    table = replace(table, tokens=table.tokens.at[schedule.row, end].set(token, mode="drop"))
    return replace(state, requests=table, block_pool=pool, prefix_cache=cache), finish


def _register(cache: PrefixCache, state: EngineState, schedule: Schedule, config: EngineConfig) -> PrefixCache:
    """The blocks that this step filled, for those who come and begin alike."""
    requests, scheduled, size = schedule.requests, schedule.scheduled, config.block_size

    def register(cache: PrefixCache) -> PrefixCache:
        filled = prefix_cache.find_filled(
            cache,
            state.requests.tokens,
            schedule.row,
            state.tables_of(requests, config),
            requests.cached,
            scheduled,
            requests.cache_salt,
            config,
        )
        return prefix_cache.register(cache, filled)

    fills = (requests.cached + scheduled) // size > requests.cached // size
    return jax.lax.cond(jnp.any(fills), register, lambda cache: cache, cache)
