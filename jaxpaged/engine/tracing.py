"""From device events to trace events: adds what the host alone knows (prompts, block lists, who stands behind whom)."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.events import LENGTH, NOT_FINISHED, STOP, Events
from jaxpaged.engine.schedule import NO_BLOCKS, NO_SLOTS, NO_TOKENS, NOBODY_WAITS
from jaxpaged.outputs import FinishReason
from jaxpaged.trace import events as trace
from jaxpaged.trace.events import WaitingReason

FINISH_REASONS: dict[int, FinishReason] = {STOP: "stop", LENGTH: "length"}
_WAIT_REASONS: dict[int, WaitingReason] = {NO_SLOTS: "slots", NO_BLOCKS: "blocks", NO_TOKENS: "tokens"}


@dataclass
class _Sequence:
    prompt_len: int
    total_len: int
    blocks: list[int]
    wait_reason: str | None = None


class Tracer:
    """Follows the requests on the device and turns each run's events into trace events, in the trace's order."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._sequences: dict[int, _Sequence] = {}
        self._waiting: list[int] = []  # by ID
        self._unexplained: list[int] = []  # waiting ones whose reason is not shown yet, by ID
        self._block_before: dict[int, int] = {}  # of the blocks that are not the first of a sequence
        self._head: int | None = None  # the first of the queue in the last step

    def enqueued(self, seq: int, prompt_len: int) -> None:
        """The request is in the device's queue from the next run on."""
        self._sequences[seq] = _Sequence(prompt_len, prompt_len, [])
        self._queue(seq)

    def cancelled(self, seq: int) -> trace.Cancelled | None:
        """The request leaves before the next step; None if it has finished."""
        sequence = self._sequences.pop(seq, None)
        if sequence is None:
            return None
        if seq in self._waiting:
            self._dequeue(seq)
        return trace.Cancelled(seq=seq, prompt_len=sequence.prompt_len, total_len=sequence.total_len)

    def run(self, events: Events, first_step: int, start_us: int, end_us: int) -> Iterator[trace.Event]:
        """The events of one run, whose first step is number `first_step`.

        The steps of a run have no clock of their own: their times are spread evenly between start and end.
        """
        handed_out = iter(events.handed_out.tolist())
        num_steps = int(events.num_steps)
        steps, waits = jax.tree.map(lambda column: column[:num_steps].tolist(), (events.steps, events.waits))
        for i in range(num_steps):
            row, wait = jax.tree.map(
                lambda column, i=i: column[i], (steps, waits), is_leaf=lambda x: isinstance(x, list)
            )
            time_us = start_us + (end_us - start_us) * (i + 1) // num_steps
            yield from self._step(row, wait, handed_out, first_step + i, time_us)

    # `row` is `Candidates`, and `wait` a `Wait`, with lists and ints where the device has arrays.
    def _step(self, row: Any, wait: Any, handed_out: Iterator[int], step: int, time_us: int) -> Iterator[trace.Event]:
        at = {"step": step, "time_us": time_us}
        candidates = range(len(row.seq))
        for i in reversed(candidates):
            if row.preempted[i]:
                seq = row.seq[i]
                sequence = self._sequences[seq]
                yield trace.Preempted(seq=seq, total_len=row.total_len[i], released=len(sequence.blocks), **at)
                sequence.blocks = []
                self._queue(seq)
        hits: list[trace.CacheHit] = []
        scheduled: list[trace.Scheduled] = []
        for i in candidates:
            blocks = [next(handed_out) for _ in range(row.new_blocks[i])]
            if not row.scheduled[i]:
                continue
            seq = row.seq[i]
            sequence = self._sequences[seq]
            if row.admitted[i]:
                self._dequeue(seq)
                if row.cached[i]:
                    hits.append(trace.CacheHit(seq=seq, tokens=row.cached[i], **at))
                    sequence.blocks = self._blocks_up_to(row.hit_block[i], row.num_blocks[i] - row.new_blocks[i])
            self._append(sequence, blocks)
            scheduled.append(
                trace.Scheduled(
                    seq=seq,
                    phase="DECODE" if row.decodes[i] else "PRE-FILL",
                    prompt_len=sequence.prompt_len,
                    total_len=row.total_len[i],
                    num_blocks=row.num_blocks[i],
                    cached=row.cached[i],
                    scheduled=row.scheduled[i],
                    blocks=tuple(sequence.blocks),
                    **at,
                )
            )
        yield from sorted(hits, key=lambda event: event.seq)
        yield from sorted(scheduled, key=lambda event: (event.phase == "DECODE", event.seq))
        yield from self._waits(wait, at)
        for i in candidates:
            sequence_len = row.total_len[i] + row.sampled[i]
            if row.scheduled[i]:
                self._sequences[row.seq[i]].total_len = sequence_len
            if row.finish[i] != NOT_FINISHED:
                sequence = self._sequences.pop(row.seq[i])
                yield trace.Finished(
                    seq=row.seq[i],
                    prompt_len=sequence.prompt_len,
                    total_len=sequence_len,
                    finish_reason=FINISH_REASONS[row.finish[i]],
                    **at,
                )

    def _append(self, sequence: _Sequence, blocks: list[int]) -> None:
        for block in blocks:
            if sequence.blocks:
                self._block_before[block] = sequence.blocks[-1]
            sequence.blocks.append(block)

    def _blocks_up_to(self, block: int, count: int) -> list[int]:
        """The blocks of a prefix from its last one: whoever held that one held those before it."""
        blocks = [block]
        while len(blocks) < count:
            blocks.append(self._block_before[blocks[-1]])
        return blocks[::-1]

    def _waits(self, wait: Any, at: dict[str, int]) -> Iterator[trace.Waiting]:
        """The head of the queue when its reason has changed, and those that newly stand behind another."""
        if wait.reason == NOBODY_WAITS:
            self._head = None
            return
        if self._head in self._waiting and self._head != wait.seq:  # a preempted one went before it
            bisect.insort(self._unexplained, self._head)
        self._head = wait.seq
        head, reason = self._sequences[wait.seq], _WAIT_REASONS[wait.reason]
        if head.wait_reason != reason:
            head.wait_reason = reason
            yield trace.Waiting(seq=wait.seq, reason=reason, needs=wait.needs, free=wait.free, ahead=0, **at)
        for seq in self._unexplained:
            if seq == wait.seq or self._sequences[seq].wait_reason == "queue_order":
                continue
            sequence = self._sequences[seq]
            sequence.wait_reason = "queue_order"
            needs, ahead = self._config.blocks_for(sequence.total_len), bisect.bisect_left(self._waiting, seq)
            yield trace.Waiting(seq=seq, reason="queue_order", needs=needs, free=wait.free_blocks, ahead=ahead, **at)
        self._unexplained.clear()

    def _queue(self, seq: int) -> None:
        self._sequences[seq].wait_reason = None
        bisect.insort(self._waiting, seq)
        bisect.insort(self._unexplained, seq)

    def _dequeue(self, seq: int) -> None:
        self._waiting.remove(seq)
        if seq in self._unexplained:
            self._unexplained.remove(seq)
