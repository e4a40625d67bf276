"""Measure peers by turns: all are loaded once, one works at a time, and each round asks every one of them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.peers.cpu import machine_seconds
from benchmarks.peers.engines.protocol import OUTPUT1
from benchmarks.peers.peers import BASELINE
from benchmarks.peers.process import PeerError, PeerProcess, Ready, Run, Run1

Say = Callable[[str], None]
Start = Callable[[], PeerProcess]
_Used = tuple[float | None, dict[str, float]]


@dataclass(frozen=True)
class Load:
    """The requests of a workload as lengths in tokens."""

    prompts: Sequence[int]
    outputs: Sequence[int]


@dataclass
class Measured:
    """What one peer gave, and why it gave no more.

    rates: output tokens a second, by the number of requests, one for each round. decodes: seconds a token at batch 1,
    one for each round. token_ids: of the first run with each number of requests. waiting_share: the most of one core
    that it used while another peer worked. disturbance: the most cores that other programs used while it worked.
    failure: after it, it is not asked again.
    """

    ready: Ready | None = None
    rates: dict[int, list[float]] = field(default_factory=dict)
    decodes: list[float] = field(default_factory=list)
    token_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    waiting_share: float | None = None
    disturbance: float | None = None
    failure: str | None = None


def measure(
    starts: Mapping[str, Start], requests: Mapping[str, int], load: Load, repeats: int, say: Say
) -> dict[str, Measured]:
    """starts: how to start each peer. requests: how many of the load each is given. The baseline, if it is among them,
    is measured with each of these numbers, so that a ratio is of one load in one round.
    """
    with ExitStack() as stack:
        turns = _Turns({name: Measured() for name in starts}, stack, say)
        for name, start in starts.items():
            turns.start(name, start)
        for number in range(repeats):
            label = f"round {number + 1} of {repeats}"
            jobs = [
                (name, size)
                for size in sorted(set(requests.values()), reverse=True)
                for name in starts
                if name == BASELINE or requests[name] == size
            ]
            for name, size in _there_and_back(jobs, number):
                turns.run(name, size, load, label)
            for name in _there_and_back(list(starts), number):
                turns.run1(name, f"{label}, batch 1")
        return turns.found


def _there_and_back[Job](jobs: Sequence[Job], number: int) -> Iterable[Job]:
    """So that none is always the first."""
    return reversed(jobs) if number % 2 else jobs


class _Turns:
    """One peer at work at a time, the others watched for what waiting costs."""

    def __init__(self, found: dict[str, Measured], stack: ExitStack, say: Say) -> None:
        self.found = found
        self._processes: dict[str, PeerProcess] = {}
        self._stack, self._say = stack, say

    def start(self, name: str, start: Start) -> None:
        def work() -> str:
            self._processes[name] = self._stack.enter_context(start())
            ready = self._processes[name].read(Ready)
            self.found[name].ready = ready
            return f"loaded in {ready.seconds:.0f} s"

        self._turn(name, "start", work)

    def run(self, name: str, size: int, load: Load, label: str) -> None:
        def work() -> str:
            run = self._processes[name].ask(f"run {size}", Run)
            _check(run.token_ids, load.outputs[:size])
            if run.prompt_tokens != sum(load.prompts[:size]):
                raise PeerError(f"was given {run.prompt_tokens} prompt tokens, not {sum(load.prompts[:size])}")
            if run.seconds <= 0:
                raise PeerError(f"took {run.seconds} seconds")
            rate = sum(load.outputs[:size]) / run.seconds
            self.found[name].rates.setdefault(size, []).append(rate)
            self.found[name].token_ids.setdefault(size, run.token_ids)
            return f"{run.seconds:.1f} s, {rate:.1f} output tokens/s with {size} requests"

        self._turn(name, label, work)

    def run1(self, name: str, label: str) -> None:
        def work() -> str:
            run = self._processes[name].ask("run1", Run1)
            _check(run.token_ids, [OUTPUT1])
            self.found[name].decodes.append(run.seconds_per_token)
            return f"{1e3 * run.seconds_per_token:.1f} ms a token"

        self._turn(name, label, work)

    def _turn(self, name: str, label: str, work: Callable[[], str]) -> None:
        if self.found[name].failure is not None:
            return
        before, start = self._used(), time.monotonic()
        try:
            said = work()
        except PeerError as error:
            said = str(error)
            self.found[name].failure = f"{label}: {error}"
            if name in self._processes:
                self._processes.pop(name).close()
        seconds = time.monotonic() - start
        self._say(f"{name}, {label}: {said}")
        self._watch(name, before, self._used(), seconds)

    def _used(self) -> _Used:
        """CPU time of the machine and of each peer, in seconds."""
        used = {name: process.cpu_seconds() for name, process in self._processes.items()}
        return machine_seconds(), {name: seconds for name, seconds in used.items() if seconds is not None}

    def _watch(self, name: str, before: _Used, after: _Used, seconds: float) -> None:
        peers = {who: (after[1][who] - before[1][who]) / seconds for who in before[1].keys() & after[1].keys()}
        for other in peers.keys() - {name}:
            self.found[other].waiting_share = max(peers[other], self.found[other].waiting_share or 0.0)
        # A process that began or ended in this turn has no share, and would count as one of the others.
        if name in peers and before[0] is not None and after[0] is not None:
            others = (after[0] - before[0]) / seconds - sum(peers.values())
            self.found[name].disturbance = max(others, self.found[name].disturbance or 0.0)


def _check(token_ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    """Raise PeerError unless there is exactly the demanded output."""
    if len(token_ids) != len(lengths):
        raise PeerError(f"answered {len(token_ids)} requests, not {len(lengths)}")
    for index, (ids, length) in enumerate(zip(token_ids, lengths, strict=True)):
        if len(ids) != length:
            raise PeerError(f"gave {len(ids)} output tokens to request {index}, not {length}")
