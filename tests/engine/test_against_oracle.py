"""The device's decisions against the plain-Python oracle: every line of every step, block IDs included."""

from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.trace import Event, check_events, format_events
from tests.engine.fake_model import MAX_SEQUENCES, MODEL_CONFIG, TOKENS_OF_A_SEQUENCE, FakeModel, token_of
from tests.oracle.fake import FakeForward
from tests.oracle.scheduler import Oracle, OracleConfig
from tests.oracle.strategies import PINNED_CONFIGS, Mix, drive, mixes

MOST_RUNS = 100  # of 64 steps, for at most 32 requests


@cache
def engine_of(config: OracleConfig) -> tuple[Engine, list[Event]]:
    """One engine for each configuration, since each is a compile; `abort_all` makes it as new."""
    events: list[Event] = []
    sizes = EngineConfig(
        **vars(config), max_num_waiting=MAX_SEQUENCES, max_steps=64, max_stop_ids=MAX_SEQUENCES, tile_q=2
    )
    return Engine(FakeModel(FakeForward(2)), MODEL_CONFIG, sizes, trace=events.append), events


def run_engine(config: OracleConfig, mix: Mix) -> tuple[list[Event], dict[int, list[int]]]:
    """The trace of a mix, numbered from 0, and each sequence's generated values."""
    engine, events = engine_of(config)
    engine.abort_all()
    events.clear()
    engine._params = nnx.state(FakeModel(mix.forward))
    first_step, first_seq, local, requests = engine._step, next(engine._ids) + 1, 0, []
    for round_ in mix.rounds:
        for place in round_.aborts:
            if place < local:
                engine.abort(first_seq + place)
        for spec in round_.requests:
            prompt = [token_of(*token) for token in spec.prompt(local)]
            local += 1
            params = SamplingParams(temperature=0, max_tokens=spec.max_tokens, ignore_eos=not spec.stop_ids)
            try:
                requests.append(engine.add_request(prompt, params, str(spec.cache_salt) if spec.cache_salt else None))
            except ValueError as error:
                assert "is refused" in str(error)
        if round_.max_steps:
            engine.run(round_.max_steps)
    for _ in range(MOST_RUNS):
        if not engine.has_unfinished_requests():
            break
        engine.run()
    else:
        raise AssertionError("the engine makes no progress")
    engine.run()  # shows what was refused last
    renumbered = [
        msgspec.structs.replace(event, seq=event.seq - first_seq, step=event.step - first_step, time_us=0)
        for event in events
    ]
    values = {r.seq - first_seq: [token % TOKENS_OF_A_SEQUENCE for token in r.token_ids] for r in requests}
    assert sorted(np.asarray(engine._state.block_pool.num_free).tolist() for _ in range(1)) == [config.num_blocks]
    return renumbered, values


def one_stop_id(mix: Mix) -> Mix:
    """The engine has one stop value for all: EOS, or none."""
    rounds = tuple(
        replace(r, requests=tuple(replace(s, stop_ids=s.stop_ids[:1]) for s in r.requests)) for r in mix.rounds
    )
    return Mix(rounds, mix.forward)


@pytest.mark.parametrize("config", PINNED_CONFIGS, ids=lambda c: "-".join(map(str, vars(c).values())))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_line_agrees(config: OracleConfig, data: st.DataObject) -> None:
    mix = one_stop_id(data.draw(mixes(config, max_requests=16)))
    oracle = Oracle(config, mix.forward)
    want = [event for step in drive(oracle, mix) for event in step]
    got, values = run_engine(config, mix)
    assert list(format_events(got)) == list(format_events(want))
    assert got == want
    aborted = {place for round_ in mix.rounds for place in round_.aborts}
    for seq, tokens in values.items():
        generated = oracle.requests[seq].generated
        # The host does not wait for the run in which a request that it gives up got more tokens, or finished.
        assert tokens == (generated[: len(tokens)] if seq in aborted else generated)
    violations = check_events(
        got,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    assert not violations
