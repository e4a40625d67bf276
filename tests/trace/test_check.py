from typing import Any

import pytest
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
    check_events,
)
from tests.trace.events import worked_example

LIMITS: dict[str, Any] = dict(num_blocks=8, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100)


def rules(events: list[Event], *, block_size: int = 256, complete: bool = True, **limits: int) -> list[str]:
    found = check_events(events, block_size=block_size, complete=complete, **(LIMITS | limits))
    return sorted({violation.rule for violation in found})


def test_the_worked_example_is_sound() -> None:
    events = list(worked_example())
    assert rules(events) == []
    assert rules(events[100:200], complete=False) == [], "a trace may start and stop anywhere"
    assert rules(events[100:200]) == ["lifecycle"]


def row(seq: int, total_len: int, cached: int, blocks: tuple[int, ...], step: int, **other: object) -> Scheduled:
    """A decode of a prompt of 4, block_size 2, unless `other` says otherwise."""
    fields: dict = dict(phase="DECODE", prompt_len=4, num_blocks=len(blocks), scheduled=1) | other
    return Scheduled(seq=seq, total_len=total_len, cached=cached, blocks=blocks, step=step, **fields)


# Two requests in a pool of 4 blocks: 1 is refused a place, 0 runs in two chunks, then 1 runs, is preempted and ends.
STORY: list[Event] = [
    Added(seq=0, prompt_len=4, max_tokens=4),
    Added(seq=1, prompt_len=4, max_tokens=2),
    Added(seq=2, prompt_len=90, max_tokens=1),
    Refused(seq=2, prompt_len=90, reason="needs 45 blocks, num_blocks is 4"),
    row(0, 4, 0, (0, 1), 0, phase="PRE-FILL", scheduled=3),
    Waiting(seq=1, reason="tokens", needs=4, free=0, ahead=0),
    row(0, 4, 3, (0, 1), 1, phase="PRE-FILL"),
    row(1, 4, 0, (2, 3), 1, phase="PRE-FILL", scheduled=2),
    Preempted(seq=1, total_len=4, released=2, step=2),
    row(0, 5, 4, (0, 1, 3), 2),
    Waiting(seq=1, reason="blocks", needs=2, free=1, ahead=0, step=2),
    row(0, 6, 5, (0, 1, 3), 3),
    row(0, 7, 6, (0, 1, 3, 2), 4),
    Finished(seq=0, prompt_len=4, total_len=8, finish_reason="length", step=4),
    row(1, 4, 0, (2, 3), 5, phase="PRE-FILL", scheduled=3),
    row(1, 4, 3, (2, 3), 6, phase="PRE-FILL"),
    row(1, 5, 4, (2, 3, 1), 7),
    Finished(seq=1, prompt_len=4, total_len=6, finish_reason="length", step=7),
]
STORY_LIMITS: dict[str, Any] = dict(
    block_size=2, num_blocks=4, max_num_batched_tokens=3, max_num_seqs=2, max_model_len=20, enable_prefix_caching=False
)


def test_the_story_is_sound() -> None:
    assert rules(STORY, **STORY_LIMITS) == []


@pytest.mark.parametrize(
    ("at", "change", "rule"),
    [
        (1, dict(seq=3), "lifecycle"),
        (0, dict(max_tokens=3), "max_tokens"),
        (0, dict(max_tokens=5), "max_tokens"),
        (3, dict(prompt_len=91), "prompt_len"),
        (3, dict(seq=3), "lifecycle"),
        (4, dict(scheduled=4), "budget"),
        (4, dict(scheduled=5), "scheduled"),
        (4, dict(scheduled=0), "scheduled"),
        (4, dict(phase="DECODE"), "phase"),
        (4, dict(seq=1), "fcfs"),
        (5, dict(needs=3), "waiting"),
        (5, dict(free=1), "waiting"),
        (5, dict(ahead=1), "waiting"),
        (5, dict(reason="slots"), "waiting"),
        (5, dict(reason="queue_order"), "waiting"),
        (6, dict(cached=2), "cached"),
        (6, dict(step=0), "once"),
        (7, dict(blocks=(1, 2)), "sharing"),
        (7, dict(blocks=(2, 2)), "blocks"),
        (7, dict(blocks=(2, 4)), "blocks"),
        (7, dict(blocks=(2,)), "num_blocks"),
        (7, dict(num_blocks=3), "num_blocks"),
        (8, dict(released=1), "blocks"),
        (8, dict(total_len=5), "total_len"),
        (8, dict(seq=0), "fcfs"),
        (8, dict(step=1), "step_order"),
        (9, dict(total_len=6, num_blocks=3), "total_len"),
        (9, dict(prompt_len=5), "prompt_len"),
        (9, dict(phase="PRE-FILL"), "phase"),
        (9, dict(scheduled=2), "scheduled"),
        (10, dict(free=2), "waiting"),
        (11, dict(blocks=(0, 1, 2)), "blocks"),
        (13, dict(total_len=9), "total_len"),
        (13, dict(step=5), "total_len"),
        (14, dict(step=2), "step_order"),
        (15, dict(cached=0, scheduled=4), "cached"),
        (17, dict(seq=0), "lifecycle"),
    ],
)
def test_each_damage_breaks_its_rule(at: int, change: dict, rule: str) -> None:
    damaged = [*STORY[:at], replace(STORY[at], **change), *STORY[at + 1 :]]
    assert rule in rules(damaged, **STORY_LIMITS)


@pytest.mark.parametrize("at", range(len(STORY)))
def test_each_line_that_must_be_there_is_missed(at: int) -> None:
    without = STORY[:at] + STORY[at + 1 :]
    assert bool(rules(without, **STORY_LIMITS)) == (not isinstance(STORY[at], Waiting))


@pytest.mark.parametrize("at", range(len(STORY)))
def test_each_line_twice_is_found(at: int) -> None:
    twice = [*STORY[: at + 1], *STORY[at:]]
    assert bool(rules(twice, **STORY_LIMITS)) == (not isinstance(STORY[at], Waiting))


def test_a_preempting_step_admits_nobody() -> None:
    readmitted = row(1, 4, 0, (2,), 2, phase="PRE-FILL", num_blocks=2)
    assert "fcfs" in rules([*STORY[:9], readmitted, *STORY[9:]], **STORY_LIMITS)


def test_cancelled_ends_a_sequence_and_frees_its_blocks() -> None:
    cancelled = Cancelled(seq=0, prompt_len=4, total_len=6, step=3)
    events = [*STORY[:11], cancelled, replace(STORY[14], step=3), replace(STORY[15], step=4)]
    assert rules(events, **STORY_LIMITS) == ["lifecycle"], "only: seq 1 never ends"
    assert rules([*events, replace(STORY[16], blocks=(2, 3, 0)), STORY[17]], **STORY_LIMITS) == []
    assert "total_len" in rules([*events[:11], replace(cancelled, total_len=7), *events[12:]], **STORY_LIMITS)


SHARED: list[Event] = [
    Added(seq=0, prompt_len=5, max_tokens=2),
    row(0, 5, 0, (0, 1, 2), 0, phase="PRE-FILL", prompt_len=5, scheduled=5),
    Added(seq=1, prompt_len=5, max_tokens=1, step=1),
    CacheHit(seq=1, tokens=4, step=1),
    row(1, 5, 4, (0, 1, 3), 1, phase="PRE-FILL", prompt_len=5),
    row(0, 6, 5, (0, 1, 2), 1, prompt_len=5),
    Finished(seq=0, prompt_len=5, total_len=7, finish_reason="length", step=1),
    Finished(seq=1, prompt_len=5, total_len=6, finish_reason="length", step=1),
]


def test_a_cache_hit_shares_a_prefix() -> None:
    assert rules(SHARED, block_size=2) == []


@pytest.mark.parametrize(
    ("at", "change", "expected"),
    [
        (3, dict(tokens=2), ["cached", "sharing"]),
        (3, dict(tokens=5), ["cached"]),
        (3, dict(step=0), ["cached", "step_order"]),
        (4, dict(cached=0, scheduled=5), ["cached"]),
        (4, dict(blocks=(0, 1, 2)), ["sharing"]),
        (4, dict(blocks=(1, 0, 3)), ["sharing"]),
        (4, dict(blocks=(0, 4, 1)), ["sharing"]),
    ],
)
def test_sharing_beyond_the_hit_is_found(at: int, change: dict, expected: list[str]) -> None:
    damaged = [*SHARED[:at], replace(SHARED[at], **change), *SHARED[at + 1 :]]
    found = rules(damaged, block_size=2)
    assert set(expected) <= set(found)


def test_sharing_without_a_hit_is_found() -> None:
    assert "sharing" in rules([*SHARED[:3], replace(SHARED[4], cached=0, scheduled=5), *SHARED[5:]], block_size=2)


def test_a_violation_says_what_and_where() -> None:
    damaged = [*STORY[:9], replace(STORY[9], cached=3), *STORY[10:]]
    violation = check_events(damaged, block_size=2)[0]
    assert (violation.step, violation.seq, violation.rule, violation.expected, violation.found) == (
        2,
        0,
        "cached",
        4,
        3,
    )
    assert violation.message == "step 2 seq 0: cached: expected 4, found 3"


@pytest.mark.parametrize("name", ["block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens"])
def test_limits_are_checked(name: str) -> None:
    limits: dict[str, Any] = {"block_size": 2} | {name: 0}
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
        check_events([], **limits)
