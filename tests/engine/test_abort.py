"""Giving up a request, at whatever moment: it ends, what it held is free, and nobody else notices."""

from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from jaxpaged.engine.engine import Engine
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.trace import Added, Cancelled, Event, Finished, Scheduled, check_events
from tests.engine.small import MODEL_CONFIG, engine_config, model, plain_outputs, prompts

PARAMS = SamplingParams(temperature=0, max_tokens=14)


def drain(engine: Engine) -> None:
    while engine.has_unfinished_requests():
        engine.run(2)
    engine.run()


@cache
def small_engine() -> tuple[Engine, list[Event]]:
    """Two requests of eight are on its host at first. One for all, since each is a compile."""
    events: list[Event] = []
    config = engine_config(max_num_waiting=2, max_num_batched_tokens=8)
    return Engine(model(), MODEL_CONFIG, config, trace=events.append), events


@pytest.mark.parametrize("runs", range(9))
@pytest.mark.parametrize("victim", [0, 4, 7])  # it runs at once, in chunks, after others have left
def test_neighbours_keep_their_tokens(victim: int, runs: int) -> None:
    engine, events = small_engine()
    engine.abort_all()
    events.clear()
    first_step = engine._step
    requests = [engine.add_request(prompt, PARAMS) for prompt in prompts()]
    for _ in range(runs):
        engine.run(2)
    given_up = engine.abort(requests[victim].seq)
    drain(engine)
    for request, expected in zip(requests, plain_outputs(), strict=True):
        if request is requests[victim] and given_up:
            assert request.finish_reason == "abort" and request.token_ids == expected[: len(request.token_ids)]
        else:
            assert (request.finish_reason, request.token_ids) == ("length", expected)
    config = engine.config
    assert int(engine._state.block_pool.num_free) == config.num_blocks
    first_seq = requests[0].seq
    shown = [replace(event, seq=event.seq - first_seq, step=event.step - first_step, time_us=0) for event in events]
    assert sorted(event.seq for event in shown if isinstance(event, Cancelled | Finished)) == list(range(8))
    assert not check_events(shown, block_size=config.block_size, num_blocks=config.num_blocks, complete=True)


def test_who_has_ended_or_never_was_is_not_aborted() -> None:
    engine = Engine(model(), MODEL_CONFIG, engine_config())
    request = engine.add_request(prompts()[0], PARAMS)
    drain(engine)
    assert [engine.abort(seq) for seq in (request.seq, request.seq + 1, -1)] == [False] * 3
    assert request.finish_reason == "length"
    other = engine.add_request(prompts()[1], PARAMS)
    assert [engine.abort(other.seq), engine.abort(other.seq)] == [True, False]
    assert other.finish_reason == "abort" and not engine.has_unfinished_requests()


def test_a_row_serves_another_request_at_once() -> None:
    """The device is a run ahead of the host: what it still says of the one that left is not taken for the new one's."""
    engine = Engine(model(), MODEL_CONFIG, engine_config(max_num_seqs=1, max_num_waiting=1))
    for round_ in range(6):
        old = engine.add_request(prompts()[4], PARAMS)
        for _ in range(round_ // 2):
            engine.run(2)
        assert engine.abort(old.seq)
        new = [engine.add_request(prompts()[i], PARAMS) for i in (0, 1)]
        drain(engine)
        assert [request.token_ids for request in new] == plain_outputs()[:2]


def test_its_blocks_are_free_before_the_next_step() -> None:
    config = engine_config(num_blocks=4, max_model_len=64)
    engine = Engine(model(), MODEL_CONFIG, config)
    big = engine.add_request([3] * 50, PARAMS)
    engine.run(2)
    assert int(engine._state.block_pool.num_free) == 0
    engine.abort(big.seq)
    engine.add_request([5] * 50, PARAMS)
    engine.run(2)
    requests = engine._state.requests.columns
    assert np.asarray(requests.num_blocks).sum() == 4 and int(engine._state.block_pool.num_free) == 0
    drain(engine)
    assert int(engine._state.block_pool.num_free) == 4


def test_many_at_once() -> None:
    config = engine_config(max_num_waiting=150, max_num_seqs=4)
    engine = Engine(model(), MODEL_CONFIG, config)
    requests = [engine.add_request([1 + i % 80, 2], PARAMS) for i in range(150)]
    engine.run(3)
    for request in requests[:149]:
        engine.abort(request.seq)
    drain(engine)
    assert requests[149].finish_reason == "length" and len(requests[149].token_ids) == 14
    assert int(engine._state.block_pool.num_free) == config.num_blocks


def test_the_trace_shows_what_it_did_last() -> None:
    """Steps of which the host had not read when it gave up the only request."""
    engine, events = small_engine()
    engine.abort_all()
    events.clear()
    request = engine.add_request(prompts()[1], PARAMS)
    engine.run(3)
    engine.abort(request.seq)
    engine.run()
    assert [type(event) for event in events] == [Added, Scheduled, Scheduled, Scheduled, Cancelled]
    assert events[-1] == Cancelled(seq=request.seq, prompt_len=1, total_len=4, step=events[-2].step + 1)
