"""The host driver: hands requests to the device, keeps it busy, and reads what it did.

Nothing is decided here. The next run is dispatched before the events of the last one are read, so the device does not
wait for Python; the host learns of everything one run late.
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx

from jaxpaged.engine.abort import abort
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.cpu import compiler_options
from jaxpaged.engine.events import NOT_FINISHED, Events
from jaxpaged.engine.prefix_cache import clear
from jaxpaged.engine.requests import Request, Update, check_params, check_prompt, new_requests, stop_ids_of, why_refused
from jaxpaged.engine.run import Run, compile_run
from jaxpaged.engine.state import EngineState, NewRequests, enqueue, init_scheduler, init_state
from jaxpaged.engine.stats import RunStats, run_stats
from jaxpaged.engine.tracing import FINISH_REASONS, Tracer
from jaxpaged.models.config import ModelConfig
from jaxpaged.sampling_params import SamplingParams, is_int
from jaxpaged.trace import Added, Cancelled, Event, Refused

_MOST_ENQUEUED_AT_ONCE = 64
_MOST_RUN_STATS = 65_536  # the latest ones; an engine may run for months


@dataclass(frozen=True)
class _Aborted:
    """A request that the device had. How far it came is known when the runs before are read."""

    seq: int


@dataclass(frozen=True)
class _InFlight:
    events: Events
    news: list[Event | _Aborted]
    enqueued: list[Request]
    dispatch_time: float


class Engine:
    """Serves requests with one model.

    `model` may be abstract, with shapes in place of parameters (`jaxpaged.models.abstract_model`): `warm_up` needs no
    more, and `update_weights` brings the parameters before the first run.
    `trace`, if given, is called with each trace event, in order. `attention_implementation` is that of
    `kernels_pallas.paged_attention` (None: the platform's kernel). Raises ValueError if the stop ids do not fit
    `config.max_stop_ids`, and NotImplementedError if the implementation does not take the model's shapes.
    """

    def __init__(
        self,
        model: nnx.Module,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        kv_dtype: np.typing.DTypeLike = jnp.float32,
        attention_implementation: str | None = None,
        seed: int = 0,
        trace: Callable[[Event], None] | None = None,
    ) -> None:
        if len(model_config.eos_token_ids) > config.max_stop_ids:
            raise ValueError(
                f"max_stop_ids is {config.max_stop_ids}, the model has {len(model_config.eos_token_ids)} EOS ids"
            )
        self.config, self.model_config = config, model_config
        self.run_stats: deque[RunStats] = deque(maxlen=_MOST_RUN_STATS)
        graphdef, self._params = nnx.split(model)
        weight_dtype = jax.tree.leaves(self._params)[0].dtype
        self._jitted = compile_run(graphdef, config, compiler_options(weight_dtype, config.max_num_seqs))
        self._run: Run = self._jitted
        self._enqueue = jax.jit(partial(_enqueue, config=config), donate_argnums=0)
        self._abort = jax.jit(partial(abort, config=config), donate_argnums=0)
        self._reset = jax.jit(partial(_reset, config=config), donate_argnums=0)
        self._clear_cache = jax.jit(_clear_cache, donate_argnums=0)
        self._cache_is_stale = False
        self._salts: dict[str, int] = {}
        self._init_state = jax.jit(
            partial(
                init_state,
                config,
                model_config.num_layers,
                model_config.num_kv_heads,
                model_config.head_dim,
                kv_dtype,
                attention_implementation,
            )
        )
        self._state = self._init_state()
        self._seeds = np.random.default_rng(seed)
        self._emit = trace
        self._tracer = Tracer(config)
        self._started = time.perf_counter()
        self._last_ready = self._started
        self._ids = itertools.count()
        self._step = 0
        self._unfinished: dict[int, Request] = {}
        self._on_host: deque[Request] = deque()  # wait for a queue place
        self._free_rows = deque(range(config.num_rows))
        self._row_of: dict[int, int] = {}  # of the requests that the device has
        self._news: list[Event | _Aborted] = []  # shown with the run that can see it first
        self._in_flight: deque[_InFlight] = deque()

    def lower(self) -> jax.stages.Lowered:
        """What `warm_up` compiles. It is Python's own work, seconds of it: nothing is gained beside other such work."""
        return self._jitted.lower(self._params, self._state, np.int32(0))

    def warm_up(self, lowered: jax.stages.Lowered | None = None) -> None:
        """Compile everything a run needs, for every bucket. Nothing compiles after this.

        `lowered`: what this engine's `lower()` gave, if it was called already.
        """
        self._run = (lowered or self.lower()).compile()
        self._state = self._enqueue(self._state, self._to_device([]))
        self._state = self._abort(self._state, np.array([self.config.num_rows], np.int32))
        self._state = jax.block_until_ready(self._reset(self._clear_cache(self._state)))

    def update_weights(self, weights: nnx.State) -> None:
        """Serve with these parameters from the next run on, and with an empty prefix cache; compiles nothing.

        Raises ValueError unless they are of the structure, shapes and dtypes of the model's own.
        """
        if _described(weights) != _described(self._params):
            raise ValueError("these weights are not of the structure, shapes and dtypes of the model's own")
        self._params = weights
        self._cache_is_stale = True

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes: requests admitted from the next run on find those alone that are computed after it."""
        self._cache_is_stale = True

    def check_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, cache_salt: str | None = None
    ) -> None:
        """Raise ValueError if `add_request` would refuse this one."""
        prompt = self._check(prompt_token_ids, params, cache_salt)
        reason = why_refused(len(prompt), params, self.config)
        if reason:
            raise ValueError(_refusal(len(prompt), reason))

    def add_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, cache_salt: str | None = None
    ) -> Request:
        """Queue a request and return it; `run()` fills it. Its ID is `seq`: they count up from 0.

        It shares the blocks of its beginning with requests of the same `cache_salt`, or none, alone.

        Raises ValueError, and harms no other request, if the prompt is no list of token ids of the vocabulary, or can
        never fit `max_model_len` or the pool; the latter has an ID and shows in the trace as REFUSED.
        """
        prompt = self._check(prompt_token_ids, params, cache_salt)
        seq = next(self._ids)
        self._news.append(Added(seq=seq, prompt_len=len(prompt), max_tokens=int(params.max_tokens)))
        reason = why_refused(len(prompt), params, self.config)
        if reason:
            self._news.append(Refused(seq=seq, prompt_len=len(prompt), reason=reason))
            raise ValueError(_refusal(len(prompt), reason))
        own_seed = int(self._seeds.integers(2**32))  # always drawn: a request's own seed must not shift the others'
        request = Request(
            seq=seq,
            prompt_token_ids=prompt,
            params=params,
            seed=own_seed if params.seed is None else int(params.seed),
            stop_ids=stop_ids_of(params, self.model_config.eos_token_ids),
            arrival_time=time.perf_counter(),
            cache_salt=0 if cache_salt is None else self._salts.setdefault(cache_salt, len(self._salts) + 1),
        )
        self._unfinished[seq] = request
        self._on_host.append(request)
        return request

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def run(self, max_steps: int | None = None) -> list[Update]:
        """Dispatch the next run of up to `max_steps` steps (None: `config.max_steps`), then read the one before it.

        Returns what that one brought, in order of IDs: nothing at the first call. Call it while
        `has_unfinished_requests()`.
        """
        max_steps = self.config.max_steps if max_steps is None else max_steps
        if not is_int(max_steps) or not 1 <= max_steps <= self.config.max_steps:
            most = self.config.max_steps
            raise ValueError(f"max_steps must be an integer from 1 to {most} (config.max_steps), not {max_steps!r}")
        if not self._unfinished:
            self._drop_runs_ahead()
            return []
        self._dispatch(max_steps)
        if len(self._in_flight) < 2:
            return []
        updates = self._read(self._in_flight.popleft())
        if not self._unfinished:
            self._drop_runs_ahead()
        return updates

    def abort(self, seq: int) -> bool:
        """Give up a request wherever it is; its `finish_reason` is "abort", and it keeps the tokens that it has so far.

        Its slot and its blocks serve the next run, and nobody else's tokens change. False, and nothing happens, if no
        such request is unfinished.
        """
        request = self._unfinished.pop(seq, None)
        if request is None:
            return False
        request.finish_reason, request.finish_time = "abort", time.perf_counter()
        if seq in self._row_of:
            row = self._row_of.pop(seq)
            self._state = self._abort(self._state, np.array([row], np.int32))
            self._free_rows.append(row)
            self._news.append(_Aborted(seq))
        else:
            self._on_host.remove(request)
            self._news.append(_cancelled(request))
        if not self._unfinished:
            while self._in_flight:  # it did something in them
                self._read(self._in_flight.popleft())
            self._drop_runs_ahead()
        return True

    def abort_all(self) -> None:
        """Drop every unfinished request; start from an empty queue and a fresh pool. For use after any exception."""
        # One raised while a call returned, as a signal is, lost the new state after the old one was donated.
        is_lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))
        self._state = self._init_state() if is_lost else self._reset(self._state)
        dropped, self._unfinished = self._unfinished.values(), {}
        self._tracer = Tracer(self.config)
        self._on_host.clear()
        self._free_rows = deque(range(self.config.num_rows))
        self._row_of.clear()
        self._drop_runs_ahead()
        self._show(_cancelled(request) for request in dropped)

    def _check(self, prompt_token_ids: Sequence[int], params: SamplingParams, cache_salt: str | None) -> list[int]:
        if not (cache_salt is None or (isinstance(cache_salt, str) and cache_salt)):
            raise ValueError(f"cache_salt must be text that is not empty, or None, not {cache_salt!r:.80}")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
        if params.stop:
            raise ValueError("stop needs text, and the engine has token ids alone: use jaxpaged.LLM, or stop_token_ids")
        check_params(params, self.model_config.eos_token_ids, self.model_config.vocab_size, self.config)
        return check_prompt(prompt_token_ids, self.model_config.vocab_size)

    @property
    def _enqueue_width(self) -> int:
        return min(self.config.num_rows, _MOST_ENQUEUED_AT_ONCE)

    def _to_device(self, requests: list[Request]) -> NewRequests:
        return new_requests(requests, [self._row_of[r.seq] for r in requests], self._enqueue_width, self.config)

    def _dispatch(self, max_steps: int) -> None:
        enqueued = []
        while self._on_host and self._free_rows:
            batch: list[Request] = []
            while self._on_host and self._free_rows and len(batch) < self._enqueue_width:
                batch.append(self._on_host.popleft())
                self._row_of[batch[-1].seq] = self._free_rows.popleft()
            self._state = self._enqueue(self._state, self._to_device(batch))
            enqueued += batch
        if self._cache_is_stale:
            self._state, self._cache_is_stale = self._clear_cache(self._state), False
        dispatch_time = time.perf_counter()
        self._state, events = self._run(self._params, self._state, np.int32(max_steps))
        self._in_flight.append(_InFlight(events, self._news, enqueued, dispatch_time))
        self._news = []

    def _read(self, run: _InFlight) -> list[Update]:
        events = jax.device_get(run.events)
        now = time.perf_counter()
        start, self._last_ready = max(run.dispatch_time, self._last_ready), now
        self.run_stats.append(run_stats(events, now - start))
        self._show(run.news)
        num_steps, first_step = int(events.num_steps), self._step
        self._step += num_steps
        if self._emit:
            for request in run.enqueued:
                self._tracer.enqueued(request.seq, len(request.prompt_token_ids))
            for event in self._tracer.run(events, first_step, self._microseconds(start), self._microseconds(now)):
                self._emit(event)
        return self._update(events, num_steps, now)

    def _update(self, events: Events, num_steps: int, now: float) -> list[Update]:
        """Append the new tokens to their requests; those that finished leave their rows."""
        steps, new_tokens = events.steps, defaultdict[int, list[int]](list)
        for step, i in np.argwhere(steps.admitted[:num_steps]):
            request = self._unfinished.get(int(steps.seq[step, i]))
            if request and request.num_cached_tokens is None:
                request.num_cached_tokens = int(steps.cached[step, i])
        for step, i in np.argwhere(steps.sampled[:num_steps]):
            seq = int(steps.seq[step, i])
            request = self._unfinished.get(seq)
            if request is None:  # aborted after this run was dispatched
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            new_tokens[seq].append(int(steps.token[step, i]))
            if steps.finish[step, i] != NOT_FINISHED:
                request.finish_reason = FINISH_REASONS[int(steps.finish[step, i])]
                request.finish_time = now
        updates = []
        for seq, token_ids in sorted(new_tokens.items()):
            request = self._unfinished[seq]
            request.token_ids += token_ids
            updates.append(Update(seq, token_ids, request.finish_reason))
            if request.finish_reason is not None:
                self._free_rows.append(self._row_of.pop(seq))
                del self._unfinished[seq]
        return updates

    def _drop_runs_ahead(self) -> None:
        """Forget runs whose events nobody needs: nothing was left for them to do, or it is dropped."""
        news = [event for run in self._in_flight for event in run.news] + self._news
        self._in_flight.clear()
        self._news = []
        self._show(news)

    def _show(self, events: Iterable[Event | _Aborted]) -> None:
        """Trace what happened outside of any run, before the next step."""
        if self._emit:
            for event in events:
                shown = self._tracer.cancelled(event.seq) if isinstance(event, _Aborted) else event
                if shown:
                    self._emit(msgspec.structs.replace(shown, step=self._step))

    def _microseconds(self, moment: float) -> int:
        return int((moment - self._started) * 1e6)


def _described(weights: nnx.State) -> tuple[Any, ...]:
    return jax.tree.structure(weights), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(weights)]


def _cancelled(request: Request) -> Cancelled:
    return Cancelled(seq=request.seq, prompt_len=len(request.prompt_token_ids), total_len=request.total_len)


def _refusal(prompt_len: int, reason: str) -> str:
    return f"a prompt of {prompt_len} tokens is refused: it {reason}"


def _enqueue(state: EngineState, new: NewRequests, config: EngineConfig) -> EngineState:
    return replace(state, requests=enqueue(state.requests, new, no_slot=config.max_num_seqs))


def _clear_cache(state: EngineState) -> EngineState:
    return replace(state, prefix_cache=state.prefix_cache and clear(state.prefix_cache))


def _reset(state: EngineState, config: EngineConfig) -> EngineState:
    return EngineState(*init_scheduler(config), state.kv)
