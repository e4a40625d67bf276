"""One engine step: schedule, allocate, forward, sample, commit."""

from collections.abc import Callable
from typing import Protocol

from jaxtyping import Array, Float, Int32

from jaxpaged.engine.allocate import allocate
from jaxpaged.engine.commit import commit
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.events import Events, record
from jaxpaged.engine.forward import Attend, forward
from jaxpaged.engine.sample import sample
from jaxpaged.engine.schedule import Schedule, make_schedule
from jaxpaged.engine.state import EngineState


class Model(Protocol):
    """What the engine serves: rows in, hidden rows out, and the head apart, since it runs on few rows."""

    def __call__(
        self, tokens: Int32[Array, " T"], positions: Int32[Array, " T"], attend: Attend
    ) -> Float[Array, "T hidden"]: ...

    def logits(self, hidden: Float[Array, "N hidden"]) -> Float[Array, "N V"]: ...


# The model's part of a step: the scheduled tokens in, the token after each candidate out.
ForwardAndSample = Callable[[EngineState, Schedule], tuple[EngineState, Int32[Array, " S"]]]


def step(
    forward_and_sample: ForwardAndSample, state: EngineState, events: Events, config: EngineConfig
) -> tuple[EngineState, Events]:
    schedule = make_schedule(state, config)
    state, schedule, handed_out = allocate(state, schedule, config)
    state, token = forward_and_sample(state, schedule)
    state, finish = commit(state, schedule, token, config)
    return state, record(events, schedule, handed_out, token, finish)


def forward_and_sample_of(model: Model, config: EngineConfig) -> ForwardAndSample:
    """The part of a step that needs a model; without one, any function of a step's schedule can stand here."""

    def forward_and_sample(state: EngineState, schedule: Schedule) -> tuple[EngineState, Int32[Array, " S"]]:
        state, hidden = forward(model, state, schedule, config)
        return state, sample(model.logits, hidden, state.requests, schedule, config)

    return forward_and_sample
