"""Counts that are exact where times are not: host round trips, compiles, bytes of temporaries."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.engine.engine import Engine
from jaxpaged.engine.run import compile_run
from jaxpaged.engine.state import init_state
from jaxpaged.sampling_params import SamplingParams
from tests.engine.small import MODEL_CONFIG, engine_config, model, plain_outputs, run_all

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def count_compiles() -> Iterator[list[str]]:
    compiles: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == COMPILE_EVENT:
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiles
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_counter_of_compiles_counts() -> None:
    with count_compiles() as compiles:
        jax.jit(lambda x: x + 41)(np.float32(1))
    assert compiles


def test_64_ragged_requests_in_one_run() -> None:
    """32-256 tokens in, 32-128 out: one dispatch does all, slots are refilled inside, and the host reads once."""
    rng = np.random.default_rng(0)
    config = engine_config(
        num_blocks=256,
        max_num_seqs=16,
        max_num_waiting=64,
        max_num_batched_tokens=512,
        max_model_len=512,
        max_steps=1024,
    )
    engine = Engine(model(), MODEL_CONFIG, config)
    engine.warm_up()
    requests = [
        engine.add_request(
            rng.integers(1, 89, rng.integers(32, 257)).tolist(),
            SamplingParams(temperature=0, max_tokens=int(rng.integers(32, 129))),
        )
        for _ in range(64)
    ]
    with count_compiles() as compiles:
        while engine.has_unfinished_requests():
            engine.run(1024)
    assert all(len(request.token_ids) == request.params.max_tokens for request in requests)
    assert len(engine.run_stats) == 1
    assert sum(stats.prefill_steps + stats.decode_steps for stats in engine.run_stats) > 128
    assert not compiles


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.0, "logit_bias": {3: 1.0}, "min_tokens": 2, "stop_token_ids": [4, 5]},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "allowed_token_ids": range(40), "ignore_eos": True},
    {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 3},
)


def test_nothing_compiles_after_warm_up() -> None:
    """Whatever the number of requests, their lengths, sampling, shared prefixes, the steps of a run, or an abort."""
    config = engine_config(num_blocks=512, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024)
    engine = Engine(model(), MODEL_CONFIG, config)
    engine.warm_up()
    expected = plain_outputs()
    with count_compiles() as compiles:
        for count in (1, 2, 8, 20):
            for length in (1, 7, 33, 100, 1000):
                for sampling in SAMPLINGS:
                    for i in range(count):
                        engine.add_request([1 + i] * length, SamplingParams(**sampling, max_tokens=5 + i))
                    while engine.has_unfinished_requests():
                        engine.run(1 + count)
        engine.reset_prefix_cache()
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=9), cache_salt="other")
        engine.run()
        engine.abort_all()
        assert [request.token_ids for request in run_all(engine)] == expected
    assert not compiles


def test_the_next_run_is_dispatched_before_the_last_one_is_read(monkeypatch) -> None:
    engine = Engine(model(), MODEL_CONFIG, engine_config())
    calls: list[str] = []
    dispatch, read = engine._dispatch, engine._read
    monkeypatch.setattr(engine, "_dispatch", lambda *args: (calls.append("dispatch"), dispatch(*args))[1])
    monkeypatch.setattr(engine, "_read", lambda *args: (calls.append("read"), read(*args))[1])
    run_all(engine, 3)
    assert calls[:6] == ["dispatch", "dispatch", "read", "dispatch", "read", "dispatch"]


@pytest.mark.parametrize("max_model_len", [64, 512])
def test_pools_are_donated_and_no_hidden_copy_is_made(max_model_len: int) -> None:
    """Temporaries stay far below one layer's pool; every buffer of the state is updated in place."""
    config = engine_config(num_blocks=8192, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=max_model_len)
    graphdef, params = nnx.split(model())
    state = init_state(config, MODEL_CONFIG.num_layers, MODEL_CONFIG.num_kv_heads, MODEL_CONFIG.head_dim, jnp.float32)
    compiled = compile_run(graphdef, config).lower(params, state, np.int32(1)).compile()
    sizes = compiled.memory_analysis()
    a_layers_pool = sum(array.nbytes for array in state.kv[0].arrays)
    all_state = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert a_layers_pool > 8_000_000
    assert sizes.temp_size_in_bytes < a_layers_pool / 8
    assert sizes.alias_size_in_bytes == all_state
    pool_shape = "f32[" + ",".join(map(str, state.kv[0].arrays[0].shape)) + "]"
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and pool_shape in line]


def test_the_donated_state_is_gone() -> None:
    engine = Engine(model(), MODEL_CONFIG, engine_config())
    pool = engine._state.kv[0].arrays[0]
    run_all(engine)
    assert pool.is_deleted()
