"""The loop on the device: steps until nothing is left to do, `max_steps` is reached, or the event buffer is full."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.events import Events, has_room, init_events
from jaxpaged.engine.state import EMPTY, EngineState
from jaxpaged.engine.step import ForwardAndSample, forward_and_sample_of, step

Run = Callable[[nnx.State, EngineState, ArrayLike], tuple[EngineState, Events]]


def run_loop(
    forward_and_sample: ForwardAndSample, state: EngineState, max_steps: ArrayLike, config: EngineConfig
) -> tuple[EngineState, Events]:
    """Up to `max_steps` steps (no more than `config.max_steps`). Admission, preemption and finishing happen inside."""

    def goes_on(carry: tuple[EngineState, Events]) -> Array:
        state, events = carry
        has_work = jnp.any(state.requests.columns.status != EMPTY)
        return has_work & (events.num_steps < max_steps) & has_room(events, config)

    def body(carry: tuple[EngineState, Events]) -> tuple[EngineState, Events]:
        return step(forward_and_sample, *carry, config)

    return jax.lax.while_loop(goes_on, body, (state, init_events(config)))


def compile_run(
    graphdef: nnx.GraphDef, config: EngineConfig, compiler_options: dict[str, str] | None = None
) -> jax.stages.Wrapped:
    """The jitted `run(params, state, max_steps)`, a `Run`, of one model and configuration. `state` is donated."""

    def run(params: nnx.State, state: EngineState, max_steps: ArrayLike) -> tuple[EngineState, Events]:
        return run_loop(forward_and_sample_of(nnx.merge(graphdef, params), config), state, max_steps, config)

    return jax.jit(run, donate_argnames="state", compiler_options=compiler_options)
