"""Serve a workload once, and say how long everything took."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxpaged.bench.probe import Run, recorded
from jaxpaged.bench.steps import Steps, read_steps
from jaxpaged.bench.workloads import BenchRequest, Workload
from jaxpaged.engine.requests import Request
from jaxpaged.llm import LLM
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.tokenizer import Detokenizer

STREAMED_STEPS = 2
"""Steps of a run while somebody reads along, as in `LLM.stream`."""


@dataclass(frozen=True)
class Times:
    """Of one request, in seconds from the start: when it was due, had its first token, and was done; tokens it got."""

    due: float
    first_token: float
    done: float
    tokens: int

    @property
    def to_first_token(self) -> float:
        return self.first_token - self.due

    @property
    def per_output_token(self) -> float | None:
        """After the first one; None if it had only that."""
        return (self.done - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Served:
    """A workload served once, in seconds. slept: without a request to serve, until the next one came."""

    seconds: float
    slept: float
    started: float
    times: list[Times]
    runs: list[Run]

    @property
    def output_tokens(self) -> int:
        return sum(times.tokens for times in self.times)

    @property
    def idle_seconds(self) -> float:
        """Without a run under way: before the first, between two, and after the last one that had steps."""
        return max(0.0, self.seconds - self.slept - sum(run.seconds for run in self.runs))

    @property
    def idle_between_runs(self) -> float:
        """The part of `idle_seconds` that an engine which is never empty has, too."""
        gaps = sum(after.start - before.end for before, after in zip(self.runs, self.runs[1:], strict=False))
        return max(0.0, gaps - self.slept)


Server = Callable[[LLM, Workload], Served]


def serve_all(llm: LLM, workload: Workload) -> Served:
    """All requests at once, through `LLM.generate`, texts included if there is a tokenizer."""
    params = [_params(request) for request in workload.requests]
    with recorded(llm.engine) as runs:
        start = time.perf_counter()
        outputs = llm.generate([request.prompt_token_ids for request in workload.requests], params, use_tqdm=False)
        seconds = time.perf_counter() - start
    times = [
        Times(
            output.metrics.arrival_time - start,
            output.metrics.first_token_time - start,
            output.metrics.finished_time - start,
            len(output.outputs[0].token_ids),
        )
        for output in outputs
    ]
    return _checked(Served(seconds, 0.0, start, times, runs), workload)


def serve_streamed(llm: LLM, workload: Workload) -> Served:
    """All requests at once, read along: runs of two steps, and every token becomes text as it comes."""
    return serve_arriving(llm, workload, streams=True)


def serve_arriving(llm: LLM, workload: Workload, streams: bool = True) -> Served:
    """Each request when it arrives; runs of two steps, so that a new one need not wait long, and text as it comes."""
    engine, waiting = llm.engine, deque(workload.requests)
    steps = min(STREAMED_STEPS, engine.config.max_steps)
    detokenizers: dict[int, Detokenizer] = {}
    requests: list[Request] = []
    slept = 0.0
    with recorded(engine) as runs:
        start = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0].arrival <= time.perf_counter() - start:
                new = waiting.popleft()
                requests.append(engine.add_request(new.prompt_token_ids, _params(new)))
                if streams and llm.has_tokenizer:
                    detokenizers[requests[-1].seq] = Detokenizer(llm.get_tokenizer())
            if not engine.has_unfinished_requests():
                before = time.perf_counter()
                time.sleep(max(0.0, waiting[0].arrival - (before - start)))
                slept += time.perf_counter() - before
                continue
            for update in engine.run(steps):
                detokenizer = detokenizers.get(update.seq)
                if detokenizer:
                    detokenizer.add(update.token_ids)
                    if update.finish_reason:
                        detokenizer.finish()
        seconds = time.perf_counter() - start
    times = [
        _times(request, start + due.arrival, start) for request, due in zip(requests, workload.requests, strict=True)
    ]
    return _checked(Served(seconds, slept, start, times, runs), workload)


def steps_of(served: list[Served], llm: LLM) -> list[Steps]:
    return [read_steps([run.events for run in each.runs], llm.engine.config) for each in served]


def decode_step_seconds(served: Served, steps: Steps, batch: int) -> list[float]:
    """Of each run that only decoded `batch` sequences: the mean time of its steps."""
    found, first = [], 0
    for run in served.runs:
        part = steps[first : first + int(run.events.num_steps)]
        first += len(part)
        if not part.prefills.any() and (part.rows == batch).all():
            found.append(run.seconds / len(part))
    return found


def seconds_by_bucket(served: Served, steps: Steps) -> dict[int, list[float]]:
    """Of each run whose steps were all of one bucket: the mean time of its steps. Steps in a run have no clock."""
    found: dict[int, list[float]] = {}
    first = 0
    for run in served.runs:
        part = steps[first : first + int(run.events.num_steps)]
        first += len(part)
        if len(np.unique(part.bucket)) == 1:
            found.setdefault(int(part.bucket[0]), []).append(run.seconds / len(part))
    return found


def _params(request: BenchRequest) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)


def _times(request: Request, due: float, start: float) -> Times:
    first, done = request.first_token_time, request.finish_time
    assert first is not None and done is not None, "only a finished request has times"
    return Times(due - start, first - start, done - start, len(request.token_ids))


def _checked(served: Served, workload: Workload) -> Served:
    if served.output_tokens != workload.output_tokens:
        raise RuntimeError(f"{served.output_tokens} tokens came out of a workload of {workload.output_tokens}")
    return served
