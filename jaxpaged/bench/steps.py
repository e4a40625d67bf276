"""The steps that a workload took: what each one computed, and the compiled shape that it ran in."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.events import Events
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.tiles import pick_bucket


@dataclass(frozen=True)
class Steps:
    """N steps of S candidates each. rows: tokens that the model computed. sampled: rows that the head ran on.

    prefills: whether the step had a prefill. bucket: index in `config.buckets`. reused: prompt tokens that admitted
    sequences did not have to compute. preempted: sequences that gave their blocks back.
    """

    rows: Int[np.ndarray, " N"]
    sampled: Int[np.ndarray, " N"]
    prefills: Bool[np.ndarray, " N"]
    bucket: Int[np.ndarray, " N"]
    reused: Int[np.ndarray, " N"]
    preempted: Int[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> "Steps":
        return Steps(**{name: column[part] for name, column in vars(self).items()})


def read_steps(all_events: Sequence[Events], config: EngineConfig) -> Steps:
    """The steps of several runs, in order. Compiles a little: call it after what is measured."""
    parts = []
    for events in all_events:
        used = slice(int(events.num_steps))
        steps = events.steps
        columns = (steps.scheduled, steps.decodes, steps.sampled, steps.cached, steps.admitted, steps.preempted)
        parts.append([np.asarray(column)[used] for column in columns])
    scheduled, decodes, sampled, cached, admitted, preempted = map(np.concatenate, zip(*parts, strict=True))
    return Steps(
        rows=scheduled.sum(axis=1),
        sampled=sampled.sum(axis=1),
        prefills=(scheduled > decodes).any(axis=1),
        bucket=_buckets(scheduled, decodes, config),
        reused=np.where(admitted, cached, 0).sum(axis=1),
        preempted=preempted.sum(axis=1),
    )


def _buckets(
    scheduled: Int[np.ndarray, "N S"], decodes: Bool[np.ndarray, "N S"], config: EngineConfig
) -> Int[np.ndarray, " N"]:
    """By the engine's own rule, which looks at these two columns of a schedule alone."""

    def one(scheduled: Int32[Array, " S"], decodes: Bool[Array, " S"]) -> Int32[Array, ""]:
        return pick_bucket(cast(Schedule, SimpleNamespace(scheduled=scheduled, decodes=decodes)), config)

    return np.asarray(jax.vmap(one)(jnp.asarray(scheduled), jnp.asarray(decodes)))
