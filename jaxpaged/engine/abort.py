"""Take requests out between two steps: whether they wait, prefill or decode, what only they held is free again."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxpaged.engine import block_pool
from jaxpaged.engine.allocate import leave
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.state import EMPTY, EngineState


def abort(state: EngineState, row: Int32[Array, " A"], config: EngineConfig) -> EngineState:
    """The requests in these rows leave, in this order. Row R is nobody's; who has finished holds nothing any more."""
    requests = state.requests[jnp.minimum(row, config.num_rows - 1)]
    leaves = row < config.num_rows
    released = jnp.where(leaves, requests.num_blocks, 0)
    pool = block_pool.release(state.block_pool, state.block_tables, requests.slot, released, last_first=False)
    return replace(state, requests=state.requests.write(row, leave(requests, leaves, EMPTY, config)), block_pool=pool)
