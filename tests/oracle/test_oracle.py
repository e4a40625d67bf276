"""The oracle alone: it obeys the trace's invariants, always moves on, never leaks, and meets every situation."""

from collections import Counter
from collections.abc import Callable

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxpaged.trace import (
    CacheHit,
    Cancelled,
    Event,
    Finished,
    Preempted,
    Refused,
    Scheduled,
    Violation,
    Waiting,
    check_events,
    format_events,
    parse_text,
)
from tests.oracle.fake import FakeForward
from tests.oracle.scheduler import Oracle, OracleConfig
from tests.oracle.strategies import PINNED_CONFIGS, Mix, RequestSpec, Round, cases, drive, mixes


def many(examples: int) -> Callable:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def violations(config: OracleConfig, events: list[Event]) -> list[Violation]:
    return check_events(
        events,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        complete=True,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def most_steps(config: OracleConfig, mix: Mix) -> int:
    """Each step consumes at least one token of the oldest running; a request alone needs no more than these."""
    return sum((r.prompt_len + r.max_tokens + 1) ** 2 for round_ in mix.rounds for r in round_.requests) + 1


@many(2000)
@given(cases())
def test_every_mix(case: tuple[OracleConfig, Mix]) -> None:
    config, mix = case
    oracle = Oracle(config, mix.forward)
    events: list[Event] = []
    for number, step in enumerate(drive(oracle, mix)):
        live = oracle.running or oracle.waiting or any(isinstance(event, Finished) for event in step)
        assert any(isinstance(event, Scheduled) for event in step) or not live, "a step without progress"
        assert number < most_steps(config, mix), "no end"
        free, held = oracle.pool_state()
        check_pool(oracle, free, held)
        assert len({request.slot for request in oracle.running}) == len(oracle.running)
        events += step
    assert violations(config, events) == []
    assert len(oracle.pool_state()[0]) == config.num_blocks
    first_seen = [event.seq for event in events if isinstance(event, Scheduled)]
    assert list(dict.fromkeys(first_seen)) == sorted(set(first_seen)), "not first come, first served"
    check_tokens(oracle, events, mix.forward)


def check_pool(oracle: Oracle, free: tuple[int, ...], held: dict[int, tuple[int, ...]]) -> None:
    """Every block is free or held; who shares one shares all before it, and it is full of the same tokens for all."""
    in_use = {block for blocks in held.values() for block in blocks}
    assert sorted([*free, *in_use]) == list(range(oracle.config.num_blocks)), "a block leaked, or is free and held"
    prefix_of: dict[int, tuple[object, ...]] = {}
    size = oracle.config.block_size
    for request in oracle.running:
        for index, block in enumerate(request.blocks):
            prefix = (tuple(request.blocks[:index]), request.cache_salt, request.tokens[: (index + 1) * size])
            assert prefix_of.setdefault(block, prefix) == prefix, f"block {block} is shared by different beginnings"
            assert oracle.holders[block] == 1 or request.cached >= (index + 1) * size, "a block is shared and not full"
    for (salt, tokens), block in oracle.block_of.items():
        assert oracle.key_of[block] == (salt, tokens)
        assert len(tokens) == size or (salt, tokens[:-size]) in oracle.block_of, "registered, and what is before not"


def check_tokens(oracle: Oracle, events: list[Event], forward: FakeForward) -> None:
    """Each sequence's tokens are its own whatever else ran, and its end is the first that a rule gives."""
    ends = {event.seq: event for event in events if isinstance(event, Finished | Cancelled)}
    for request in oracle.requests:
        if request.seq not in ends:
            assert not request.generated
            continue
        prompt_len, total_len = request.prompt_len, ends[request.seq].total_len
        assert request.generated == [forward(request.content, position) for position in range(prompt_len, total_len)]
        stops = [token in request.stop_ids for token in request.generated]
        assert not any(stops[:-1])
        end = ends[request.seq]
        if isinstance(end, Finished):
            assert end.finish_reason == ("stop" if stops[-1] else "length")


@many(200)
@given(cases())
def test_the_text_holds_the_whole_trace(case: tuple[OracleConfig, Mix]) -> None:
    config, mix = case
    events = [event for step in drive(Oracle(config, mix.forward), mix) for event in step]
    known = [replace(event, finish_reason=None) if isinstance(event, Finished) else event for event in events]
    assert list(parse_text(format_events(events))) == known


@many(200)
@given(cases())
def test_head_lines_are_those_of_the_whole(case: tuple[OracleConfig, Mix]) -> None:
    config, mix = case
    whole = [event for step in drive(Oracle(config, mix.forward), mix) for event in step]
    heads = [event for step in drive(Oracle(config, mix.forward, waiting_lines="head"), mix) for event in step]
    assert heads == [event for event in whole if not (isinstance(event, Waiting) and event.ahead)]


@pytest.mark.parametrize("schedule", ["mixed", "prefill_first"])
def test_pinned_configs_meet_every_situation(schedule: str) -> None:
    met: Counter[str] = Counter()
    for config in (config for config in PINNED_CONFIGS if config.schedule == schedule):

        @many(50)
        @given(st.just(config), mixes(config))
        def run(config: OracleConfig, mix: Mix) -> None:
            events = [event for step in drive(Oracle(config, mix.forward), mix) for event in step]
            assert violations(config, events) == []
            met.update(situations(events))

        run()
    every = ["refused", "stop", "length", "slots", "blocks", "queue_order", "tokens", "chunk", "preempted"]
    every += ["hit", "hit after preemption", "shared block", "fully cached"]
    rare = [situation for situation in every if met[situation] < 30]
    assert not rare or (schedule == "prefill_first" and rare == ["tokens"]), met


def situations(events: list[Event]) -> list[str]:
    met = []
    preempted: set[int] = set()
    holder: dict[tuple[int, int], int] = {}
    for event in events:
        match event:
            case Preempted():
                met.append("preempted")
                preempted.add(event.seq)
            case CacheHit():
                met.append("hit after preemption" if event.seq in preempted else "hit")
            case Refused():
                met.append("refused")
            case Waiting():
                met.append(event.reason)
            case Finished():
                met.append(str(event.finish_reason))
            case Scheduled(phase="PRE-FILL") if event.cached + event.scheduled < event.total_len:
                met.append("chunk")
            case Scheduled(phase="PRE-FILL") if event.cached and event.scheduled == 1:
                met.append("fully cached")
            case _:
                pass
        if isinstance(event, Scheduled):
            if (event.step, event.blocks[0]) in holder:
                met.append("shared block")
            holder[event.step, event.blocks[0]] = event.seq
    return met


def test_the_fake_forward_is_the_same_on_device() -> None:
    forward = FakeForward(vocab_size=37, salt=2**31 + 5)
    seqs, positions = jnp.meshgrid(jnp.arange(20), jnp.arange(50), indexing="ij")
    tokens = forward.on_device(seqs, positions)
    assert tokens.tolist() == [[forward(seq, position) for position in range(50)] for seq in range(20)]
    assert len(set(tokens.ravel().tolist())) == 37


def test_a_trace_by_hand() -> None:
    """Two requests, three blocks of two tokens, four tokens a step: chunk, preemption, recomputation."""
    config = OracleConfig(block_size=2, num_blocks=3, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=10)
    mix = Mix((Round((RequestSpec(2, 4), RequestSpec(3, 1), RequestSpec(9, 2)), 0),), FakeForward(100))
    events = [event for step in drive(Oracle(config, mix.forward), mix) for event in step]
    assert list(format_events(events)) == BY_HAND.strip().splitlines()


BY_HAND = """
ADDED: seq[0] prompt_len=2 max_tokens=4
ADDED: seq[1] prompt_len=3 max_tokens=1
ADDED: seq[2] prompt_len=9 max_tokens=2
REFUSED: seq[2] prompt_len=9 needs 5 blocks, num_blocks is 3
PRE-FILL step=0 seqs=2 tokens=4
seq[  0] prompt_len=    2 total_len=    2 blocks=  1 cached=    0 scheduled=   2 blocks=[0]
seq[  1] prompt_len=    3 total_len=    3 blocks=  2 cached=    0 scheduled=   2 blocks=[1, 2]
PREEMPTED: seq[1] total_len=3 released=2
DECODE step=1 seqs=1 tokens=1
seq[  0] prompt_len=    2 total_len=    3 blocks=  2 cached=    2 scheduled=   1 blocks=[0, 2]
WAITING: seq[1] needs=2 blocks free=1 ahead=0
DECODE step=2 seqs=1 tokens=1
seq[  0] prompt_len=    2 total_len=    4 blocks=  2 cached=    3 scheduled=   1 blocks=[0, 2]
DECODE step=3 seqs=1 tokens=1
seq[  0] prompt_len=    2 total_len=    5 blocks=  3 cached=    4 scheduled=   1 blocks=[0, 2, 1]
FINISHED: seq[0] prompt=2 + generated=4 = 6 total
PRE-FILL step=4 seqs=1 tokens=3
seq[  1] prompt_len=    3 total_len=    3 blocks=  2 cached=    0 scheduled=   3 blocks=[1, 2]
FINISHED: seq[1] prompt=3 + generated=1 = 4 total
"""


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "reason"),
    [
        (9, 1, None),
        (10, 1, "needs 11 tokens, max_model_len is 10"),
        (30, 1, "needs 31 tokens, max_model_len is 10"),
        (1, 6, None),  # the seventh token is never consumed
        (1, 7, "needs 4 blocks, num_blocks is 3"),
        (6, 1, None),
        (7, 1, "needs 4 blocks, num_blocks is 3"),
        (1, 100, "needs 5 blocks, num_blocks is 3"),  # max_model_len bounds what it can hold
    ],
)
def test_what_is_refused(prompt_len: int, max_tokens: int, reason: str | None) -> None:
    pool = 5 if prompt_len == 9 else 3
    oracle = Oracle(OracleConfig(2, pool, 2, 4, 10), FakeForward(100))
    oracle.add_request(prompt_len, max_tokens)
    refused = [event.reason for event in oracle.step() if isinstance(event, Refused)]
    assert refused == ([reason] if reason else [])


def test_the_same_reason_is_printed_again_after_an_admission() -> None:
    """Request 2 waits for the blocks of 0, runs, is preempted by the growth of 1, and waits for blocks again."""
    config = OracleConfig(block_size=2, num_blocks=5, max_num_seqs=3, max_num_batched_tokens=20, max_model_len=10)
    mix = Mix((Round((RequestSpec(3, 2), RequestSpec(4, 5), RequestSpec(3, 4)), 0),), FakeForward(100))
    events = [event for step in drive(Oracle(config, mix.forward), mix) for event in step]
    waits = [
        (event.step, event.seq, event.reason, event.needs, event.free) for event in events if type(event) is Waiting
    ]
    assert waits == [(0, 2, "blocks", 2, 1), (3, 2, "blocks", 2, 1)]
