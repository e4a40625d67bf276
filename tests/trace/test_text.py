import itertools

import pytest
from hypothesis import example, given
from msgspec.structs import replace

from jaxpaged.trace import (
    Added,
    CacheHit,
    Cancelled,
    Event,
    Finished,
    Preempted,
    Refused,
    Scheduled,
    Waiting,
    format_event,
    format_events,
    parse_text,
)
from tests.trace.events import traces, worked_example


def text_of(events: list[Event]) -> list[str]:
    return list(format_events(events))


def test_worked_example_to_the_character() -> None:
    lines = text_of(list(worked_example()))
    assert lines[:8] == [f"ADDED: seq[{seq}] prompt_len=6 max_tokens=64" for seq in range(8)]
    assert lines[8] == "PRE-FILL step=0 seqs=8 tokens=48"
    assert lines[16] == "seq[  7] prompt_len=    6 total_len=    6 blocks=  1 cached=    0 scheduled=   6 blocks=[7]"
    step_59 = lines.index("DECODE step=59 seqs=8 tokens=8")
    assert (
        lines[step_59 + 8]
        == "seq[  7] prompt_len=    6 total_len=   65 blocks=  1 cached=   64 scheduled=   1 blocks=[7]"
    )
    assert lines[-1] == "FINISHED: seq[7] prompt=6 + generated=64 = 70 total"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Added(seq=7, prompt_len=6, max_tokens=64), "ADDED: seq[7] prompt_len=6 max_tokens=64"),
        (
            Refused(seq=8, prompt_len=9000, reason="needs 9001 tokens, max_model_len is 8192"),
            "REFUSED: seq[8] prompt_len=9000 needs 9001 tokens, max_model_len is 8192",
        ),
        (Preempted(seq=3, total_len=300, released=2), "PREEMPTED: seq[3] total_len=300 released=2"),
        (Waiting(seq=9, reason="slots", needs=1, free=0, ahead=0), "WAITING: seq[9] needs=1 slots free=0 ahead=0"),
        (Waiting(seq=9, reason="blocks", needs=3, free=1, ahead=0), "WAITING: seq[9] needs=3 blocks free=1 ahead=0"),
        (Waiting(seq=9, reason="tokens", needs=5, free=0, ahead=0), "WAITING: seq[9] needs=5 tokens free=0 ahead=0"),
        (
            Waiting(seq=10, reason="queue_order", needs=2, free=1, ahead=1),
            "WAITING: seq[10] needs=2 blocks free=1 ahead=1",
        ),
        (CacheHit(seq=4, tokens=512), "CACHE HIT: seq[4] tokens=512"),
        (Cancelled(seq=4, prompt_len=6, total_len=9), "CANCELLED: seq[4] prompt=6 + generated=3 = 9 total"),
        (
            Finished(seq=7, prompt_len=6, total_len=70, finish_reason=None),
            "FINISHED: seq[7] prompt=6 + generated=64 = 70 total",
        ),
    ],
)
def test_each_kind_both_ways(event: Event, line: str) -> None:
    assert format_event(event) == line
    assert list(parse_text([line + "\n"])) == [event]


def test_wide_values_widen_their_field() -> None:
    event = Scheduled(
        seq=1234,
        phase="DECODE",
        prompt_len=123456,
        total_len=234567,
        num_blocks=1000,
        cached=345678,
        scheduled=45678,
        blocks=(1234, 5),
    )
    line = "seq[1234] prompt_len=123456 total_len=234567 blocks=1000 cached=345678 scheduled=45678 blocks=[1234, 5]"
    assert text_of([event]) == ["DECODE step=0 seqs=1 tokens=45678", line]


@given(traces())
@example(list(worked_example()))
def test_round_trip(events: list[Event]) -> None:
    known = [replace(event, finish_reason=None) if isinstance(event, Finished) else event for event in events]
    lines = text_of(events)
    assert list(parse_text(lines)) == known
    assert text_of(list(parse_text(lines))) == lines


@given(traces())
def test_noise_is_ignored_only_when_not_strict(events: list[Event]) -> None:
    noisy = [
        "2026 INFO loading",
        *itertools.chain.from_iterable((line, "noise: seq[ 1] step=") for line in text_of(events)),
    ]
    assert list(parse_text(noisy, strict=False)) == list(parse_text(text_of(events)))
    with pytest.raises(ValueError, match=r"^line 1: not a line of a trace: '2026 INFO loading'$"):
        list(parse_text(noisy))


def test_a_step_is_printed_as_soon_as_it_is_complete() -> None:
    events = iter(worked_example())
    lines = format_events(events)
    assert list(itertools.islice(lines, 9))[8] == "PRE-FILL step=0 seqs=8 tokens=48"
    following = next(events)
    assert (following.step, following.seq) == (1, 1), "the formatter reads one event past the step's part"


def test_a_mixed_step_has_two_parts() -> None:
    decode = Scheduled(
        seq=0, phase="DECODE", prompt_len=1, total_len=2, num_blocks=1, cached=1, scheduled=1, blocks=(0,), step=3
    )
    prefill = replace(decode, seq=1, phase="PRE-FILL", cached=0, scheduled=2, blocks=(1,))
    headers = [line for line in text_of([prefill, decode]) if "step=" in line]
    assert headers == ["PRE-FILL step=3 seqs=1 tokens=2", "DECODE step=3 seqs=1 tokens=1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seqs=8", "seqs=9"), "line 9: the header says seqs=9 tokens=48, its lines add up to seqs=8 tokens=48"),
        (("tokens=48", "tokens=47"), "line 9: the header says seqs=8 tokens=47, its lines add up"),
        (("generated=64", "generated=63"), "line 585: expected 'FINISHED: .* generated=64 = 70 total', found"),
        (("cached=   64", "cached=  64"), "line 541: expected"),
        (("blocks=[7]", "blocks=[07]"), "line 17: expected"),
        (("PRE-FILL step", "PREFILL step"), "line 9: not a line of a trace"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(change: tuple[str, str], message: str) -> None:
    text = "\n".join(format_events(worked_example())).replace(*change)
    with pytest.raises(ValueError, match=message):
        list(parse_text(text.split("\n")))


def test_a_scheduled_line_needs_a_header() -> None:
    lines = text_of(list(worked_example()))[9:10]
    with pytest.raises(ValueError, match=r"^line 1: a scheduled sequence needs a step's header before it"):
        list(parse_text(lines))
    assert list(parse_text(lines, strict=False)) == []


def test_a_whole_text_is_parsed_like_its_lines() -> None:
    text = "FINISHED: seq[7] prompt=6 + generated=64 = 70 total\n"
    assert list(parse_text(text)) == list(parse_text([text]))
