import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxpaged.trace import Event, Finished, read_jsonl, write_jsonl
from tests.trace.events import any_event, counts, worked_example


def jsonl_of(events: list[Event]) -> str:
    file = io.StringIO()
    write_jsonl(events, file)
    return file.getvalue()


@given(st.lists(st.tuples(any_event, counts, counts)))
def test_round_trip(drawn: list[tuple[Event, int, int]]) -> None:
    events = [replace(event, step=step, time_us=time_us) for event, step, time_us in drawn]
    text = jsonl_of(events)
    assert text.count("\n") == len(events)
    assert list(read_jsonl(io.StringIO(text))) == events
    assert list(read_jsonl(text.encode().splitlines())) == events


def test_names() -> None:
    objects = [json.loads(line) for line in jsonl_of(list(worked_example())).splitlines()]
    assert objects[8 + 59 * 8 + 7] == {
        "event": "scheduled",
        "seq": 7,
        "phase": "DECODE",
        "prompt_len": 6,
        "total_len": 65,
        "num_blocks": 1,
        "cached": 64,
        "scheduled": 1,
        "blocks": [7],
        "step": 59,
        "time_us": 0,
    }
    assert objects[-1]["event"] == "finished"
    assert objects[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "nonsense",
        '{"event":"unheard_of","seq":1}',
        '{"seq":1,"tokens":2}',
        '{"event":"cache_hit","seq":1}',
        '{"event":"cache_hit","seq":1,"tokens":-2}',
        '{"event":"cache_hit","seq":1.5,"tokens":2}',
        '{"event":"cache_hit","seq":1,"tokens":2,"more":3}',
        b"\xff",
    ],
)
def test_a_bad_line_is_refused_with_its_number(bad: str | bytes) -> None:
    good = jsonl_of([Finished(seq=0, prompt_len=1, total_len=2, finish_reason="stop")])
    events = read_jsonl([good, "\n", bad])
    assert next(events).seq == 0
    with pytest.raises(ValueError, match=r"^line 3: not a trace event: "):
        next(events)
