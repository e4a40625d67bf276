"""Trace events as text, fixed to the character, and back."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec

from jaxpaged.trace.events import (
    Added,
    CacheHit,
    Cancelled,
    Event,
    Finished,
    Phase,
    Preempted,
    Refused,
    Scheduled,
    Waiting,
    WaitingReason,
)


def format_event(event: Event) -> str:
    """The one line of an event, without a step's header."""
    match event:
        case Scheduled():
            return (
                f"seq[{event.seq:3d}] prompt_len={event.prompt_len:5d} total_len={event.total_len:5d} "
                f"blocks={event.num_blocks:3d} cached={event.cached:5d} scheduled={event.scheduled:4d} "
                f"blocks={list(event.blocks)}"
            )
        case Added():
            return f"ADDED: seq[{event.seq}] prompt_len={event.prompt_len} max_tokens={event.max_tokens}"
        case Refused():
            return f"REFUSED: seq[{event.seq}] prompt_len={event.prompt_len} {event.reason}"
        case Preempted():
            return f"PREEMPTED: seq[{event.seq}] total_len={event.total_len} released={event.released}"
        case CacheHit():
            return f"CACHE HIT: seq[{event.seq}] tokens={event.tokens}"
        case Waiting():
            unit = "blocks" if event.reason == "queue_order" else event.reason
            return f"WAITING: seq[{event.seq}] needs={event.needs} {unit} free={event.free} ahead={event.ahead}"
        case Cancelled():
            return f"CANCELLED: {_sum(event)}"
        case Finished():
            return f"FINISHED: {_sum(event)}"


def _sum(event: Cancelled | Finished) -> str:
    generated = event.total_len - event.prompt_len
    return f"seq[{event.seq}] prompt={event.prompt_len} + generated={generated} = {event.total_len} total"


def format_events(events: Iterable[Event]) -> Iterator[str]:
    """Yields the lines of a trace, without line ends, as events come."""
    formatter = TextFormatter()
    for event in events:
        yield from formatter.add(event)
    yield from formatter.end()


class TextFormatter:
    """Events in, lines out. Each part of a step (its sequences of one phase) is held back until it ends: its header
    counts it."""

    def __init__(self) -> None:
        self._part: list[Scheduled] = []

    def add(self, event: Event) -> list[str]:
        """The lines that `event` completes."""
        part = self._part
        goes_on = isinstance(event, Scheduled) and part and (event.step, event.phase) == (part[0].step, part[0].phase)
        lines = [] if goes_on else self.end()
        if isinstance(event, Scheduled):
            self._part.append(event)
        else:
            lines.append(format_event(event))
        return lines

    def end(self) -> list[str]:
        """The lines that are held back, when no more events come."""
        part, self._part = self._part, []
        return list(_format_part(part)) if part else []


def _format_part(part: list[Scheduled]) -> Iterator[str]:
    yield _format_header(part[0].phase, part[0].step, len(part), sum(line.scheduled for line in part))
    yield from map(format_event, part)


def _format_header(phase: str, step: int, seqs: int, tokens: int) -> str:
    return f"{phase} step={step} seqs={seqs} tokens={tokens}"


_N = "[0-9]{1,18}"
_HEADER = re.compile(f"(?P<phase>PRE-FILL|DECODE) step=(?P<step>{_N}) seqs=(?P<seqs>{_N}) tokens=(?P<tokens>{_N})")
_SCHEDULED = re.compile(
    rf"seq\[ *(?P<seq>{_N})\] prompt_len= *(?P<prompt_len>{_N}) total_len= *(?P<total_len>{_N}) "
    rf"blocks= *(?P<num_blocks>{_N}) cached= *(?P<cached>{_N}) scheduled= *(?P<scheduled>{_N}) "
    rf"blocks=\[(?P<blocks>[0-9, ]*)\]"
)
_SUM = rf"seq\[(?P<seq>{_N})\] prompt=(?P<prompt_len>{_N}) \+ generated={_N} = (?P<total_len>{_N}) total"
_OTHERS: dict[type[Event], re.Pattern[str]] = {
    Added: re.compile(rf"ADDED: seq\[(?P<seq>{_N})\] prompt_len=(?P<prompt_len>{_N}) max_tokens=(?P<max_tokens>{_N})"),
    Refused: re.compile(rf"REFUSED: seq\[(?P<seq>{_N})\] prompt_len=(?P<prompt_len>{_N}) (?P<reason>.*)"),
    Preempted: re.compile(
        rf"PREEMPTED: seq\[(?P<seq>{_N})\] total_len=(?P<total_len>{_N}) released=(?P<released>{_N})"
    ),
    CacheHit: re.compile(rf"CACHE HIT: seq\[(?P<seq>{_N})\] tokens=(?P<tokens>{_N})"),
    Waiting: re.compile(
        rf"WAITING: seq\[(?P<seq>{_N})\] needs=(?P<needs>{_N}) (?P<reason>slots|blocks|tokens) "
        rf"free=(?P<free>{_N}) ahead=(?P<ahead>{_N})"
    ),
    Cancelled: re.compile(f"CANCELLED: {_SUM}"),
    Finished: re.compile(f"FINISHED: {_SUM}"),
}
# These stand before the header of their step, the others after it.
_LEADING = (Added, Refused, Cancelled, Preempted, CacheHit)


def parse_text(lines: str | Iterable[str], *, strict: bool = True) -> Iterator[Event]:
    """Yields the events of a text trace, given whole or line by line; line ends are optional.

    What the text does not hold is unknown: `time_us` is 0 and `finish_reason` None. Events printed before a header
    get its step; after the last header, the step that would come next.

    Raises ValueError with the line's number for a line that is almost, but not exactly, a line of a trace. In strict
    mode also for any other line and for a header whose counts are not those of its lines; else those are ignored.
    """
    leading: list[Event] = []
    part: _Part | None = None
    last_step = -1
    for number, raw in enumerate(lines.splitlines() if isinstance(lines, str) else lines, 1):
        line = raw.rstrip("\r\n")
        if header := _HEADER.fullmatch(line):
            if strict and part:
                part.check()
            part = _Part(number, header)
            _require_exact(number, line, part.line())
            last_step = part.step
            yield from (msgspec.structs.replace(event, step=last_step) for event in leading)
            leading.clear()
        elif scheduled := _SCHEDULED.fullmatch(line):
            if part:
                event = part.add(scheduled)
                _require_exact(number, line, format_event(event))
                yield event
            elif strict:
                raise ValueError(f"line {number}: a scheduled sequence needs a step's header before it: {line!r}")
        elif other := _parse_other(line):
            _require_exact(number, line, format_event(other))
            if strict and part:
                part.check()
            part = None
            if isinstance(other, _LEADING):
                leading.append(other)
            else:
                yield msgspec.structs.replace(other, step=max(last_step, 0))
        elif strict:
            raise ValueError(f"line {number}: not a line of a trace: {line!r}")
    if strict and part:
        part.check()
    yield from (msgspec.structs.replace(event, step=last_step + 1) for event in leading)


class _Part:
    """The open part of a step: what its header says and what its lines add up to."""

    def __init__(self, number: int, header: re.Match[str]) -> None:
        self.number = number
        self.phase = cast(Phase, header["phase"])
        self.step, self.seqs, self.tokens = int(header["step"]), int(header["seqs"]), int(header["tokens"])
        self.found_seqs = self.found_tokens = 0

    def line(self) -> str:
        return _format_header(self.phase, self.step, self.seqs, self.tokens)

    def add(self, match: re.Match[str]) -> Scheduled:
        names = ("seq", "prompt_len", "total_len", "num_blocks", "cached", "scheduled")
        blocks = tuple(int(block) for block in match["blocks"].replace(",", " ").split())
        event = Scheduled(**{name: int(match[name]) for name in names}, phase=self.phase, blocks=blocks, step=self.step)
        self.found_seqs += 1
        self.found_tokens += event.scheduled
        return event

    def check(self) -> None:
        if (self.seqs, self.tokens) != (self.found_seqs, self.found_tokens):
            raise ValueError(
                f"line {self.number}: the header says seqs={self.seqs} tokens={self.tokens}, "
                f"its lines add up to seqs={self.found_seqs} tokens={self.found_tokens}"
            )


def _parse_other(line: str) -> Event | None:
    for kind, pattern in _OTHERS.items():
        if match := pattern.fullmatch(line):
            fields: dict[str, Any] = {k: v if k == "reason" else int(v) for k, v in match.groupdict().items()}
            if kind is Finished:
                fields["finish_reason"] = None
            if kind is Waiting:
                fields["reason"] = _waiting_reason(match["reason"], int(match["ahead"]))
            return kind(**fields)
    return None


def _waiting_reason(unit: str, ahead: int) -> WaitingReason:
    # The text prints queue_order in blocks; only the head of the queue (ahead=0) can wait for blocks themselves.
    return "queue_order" if unit == "blocks" and ahead else cast(WaitingReason, unit)


def _require_exact(number: int, line: str, exact: str) -> None:
    if line != exact:
        raise ValueError(f"line {number}: expected {exact!r}, found {line!r}")
