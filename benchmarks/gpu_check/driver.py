"""The host's part without msgspec, which the check's machine may lack: the calls of `Engine` that the check makes.

It keeps the device busy as `Engine` does, the next run being dispatched before the last one's events are read, but
refuses nothing, traces nothing, and has every request in the device's table from the start.
"""

import time
from collections import deque
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.events import NOT_FINISHED, Events
from jaxpaged.engine.requests import Request, new_requests
from jaxpaged.engine.run import compile_run
from jaxpaged.engine.state import EngineState, NewRequests, enqueue, init_state
from jaxpaged.engine.stats import RunStats, run_stats
from jaxpaged.models.config import ModelConfig
from jaxpaged.sampling_params import SamplingParams

_ENQUEUED_AT_ONCE = 64


class Driver:
    """`config.num_rows` is the most requests that it takes at a time. preemptions, chunks: how many there have been; a
    chunk is a prefill that left some of its sequence's tokens for a later step."""

    def __init__(
        self,
        model: nnx.Module,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        kv_dtype: np.typing.DTypeLike = jnp.float32,
        attention_implementation: str | None = None,
    ) -> None:
        self.config = config
        self.run_stats: list[RunStats] = []
        self.preemptions = self.chunks = 0
        graphdef, self._params = nnx.split(model)
        self._run = compile_run(graphdef, config)
        self._enqueue = jax.jit(partial(_enqueue, config=config), donate_argnums=0)
        sizes = model_config.num_layers, model_config.num_kv_heads, model_config.head_dim
        self._state = init_state(config, *sizes, kv_dtype, attention_implementation)
        self._new: list[Request] = []
        self._unfinished: dict[int, Request] = {}
        self._free_rows = list(range(config.num_rows))
        self._row_of: dict[int, int] = {}
        self._in_flight: deque[tuple[Events, float]] = deque()
        self._next_seq = 0
        self._last_ready = 0.0

    def warm_up(self) -> None:
        """Compile everything."""
        self._state = self._enqueue(self._state, self._to_device([]))
        self._state, _ = self._run(self._params, self._state, np.int32(0))
        jax.block_until_ready(self._state)

    def add_request(self, prompt: list[int], params: SamplingParams) -> Request:
        request = Request(self._next_seq, prompt, params, 0, (), time.perf_counter())
        self._next_seq += 1
        self._row_of[request.seq] = self._free_rows.pop(0)
        self._unfinished[request.seq] = request
        self._new.append(request)
        return request

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def run(self, max_steps: int | None = None) -> None:
        for i in range(0, len(self._new), _ENQUEUED_AT_ONCE):
            self._state = self._enqueue(self._state, self._to_device(self._new[i : i + _ENQUEUED_AT_ONCE]))
        self._new = []
        dispatched = time.perf_counter()
        self._state, events = self._run(self._params, self._state, np.int32(max_steps or self.config.max_steps))
        self._in_flight.append((events, dispatched))
        if len(self._in_flight) > 1:
            self._read(*self._in_flight.popleft())
        if not self._unfinished:
            self._in_flight.clear()

    def _read(self, on_device: Events, dispatched: float) -> None:
        events = jax.device_get(on_device)
        now = time.perf_counter()
        self.run_stats.append(run_stats(events, now - max(dispatched, self._last_ready)))
        self._last_ready = now
        steps, used = events.steps, slice(int(events.num_steps))
        self.preemptions += int(steps.preempted[used].sum())
        is_chunk = ~steps.decodes & (steps.scheduled > 0) & (steps.cached + steps.scheduled < steps.total_len)
        self.chunks += int(is_chunk[used].sum())
        for step, i in np.argwhere(steps.sampled[used]):
            seq = int(steps.seq[step, i])
            self._unfinished[seq].token_ids.append(int(steps.token[step, i]))
            if steps.finish[step, i] != NOT_FINISHED:
                del self._unfinished[seq]
                self._free_rows.append(self._row_of.pop(seq))

    def _to_device(self, requests: list[Request]) -> NewRequests:
        rows = [self._row_of[request.seq] for request in requests]
        return new_requests(requests, rows, min(self.config.num_rows, _ENQUEUED_AT_ONCE), self.config)


def _enqueue(state: EngineState, new: NewRequests, config: EngineConfig) -> EngineState:
    return replace(state, requests=enqueue(state.requests, new, no_slot=config.max_num_seqs))
