"""The prefix cache in the engine: who hits what, and that nobody's tokens change. Decisions: test_against_oracle.py."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.engine import prefix_cache
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.requests import Request
from jaxpaged.models import random_model
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.trace import CacheHit, Event, Preempted
from tests.engine.small import MODEL_CONFIG, engine_config, model

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def engine_of(trace: list[Event] | None = None, **sizes: Any) -> Engine:
    config = engine_config(block_size=4, max_model_len=128, **{"num_blocks": 128, **sizes})
    return Engine(model(), MODEL_CONFIG, config, trace=None if trace is None else trace.append)


def run(engine: Engine, prompts: Sequence[list[int]], at_once: bool = True, **params: Any) -> list[Request]:
    requests = []
    for prompt in prompts:
        requests.append(engine.add_request(prompt, SamplingParams(**{**GREEDY, **params})))
        while not at_once and engine.has_unfinished_requests():
            engine.run()
    while engine.has_unfinished_requests():
        engine.run()
    return requests


def tokens_of(requests: Sequence[Request]) -> list[list[int]]:
    return [request.token_ids for request in requests]


def cached(requests: Sequence[Request]) -> list[int | None]:
    return [request.num_cached_tokens for request in requests]


def draw(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(1, MODEL_CONFIG.vocab_size, (count, length)).tolist()


def hit_with_salt(engine: Engine, prompt: list[int], salt: str | None) -> int | None:
    request = engine.add_request(prompt, SamplingParams(**GREEDY), cache_salt=salt)
    while engine.has_unfinished_requests():
        engine.run()
    return request.num_cached_tokens


def without_cache(prompts: Sequence[list[int]], **params: Any) -> list[list[int]]:
    return tokens_of(run(engine_of(enable_prefix_caching=False, num_blocks=512), prompts, **params))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("budget", [4, 32])
def test_a_repeated_prompt_of_whole_blocks(k: int, budget: int) -> None:
    """Its last token is computed again, also with a chunk budget of one block and a pool of one block to spare."""
    (prompt,) = draw(1, 4 * k)
    expected = without_cache([prompt], max_tokens=4)
    engine = engine_of(num_blocks=k + 1, max_num_batched_tokens=budget)
    for repetition in range(3):
        requests = run(engine, [prompt], max_tokens=4)
        assert tokens_of(requests) == expected
        assert cached(requests) == [4 * (k - 1) if repetition else 0]


def test_prompts_that_differ_in_the_first_block_alone_share_nothing() -> None:
    (prompt,) = draw(1, 30)
    other = [prompt[0] % 80 + 1, *prompt[1:]]
    requests = run(engine_of(), [prompt, other, prompt], at_once=False)
    assert cached(requests) == [0, 0, 28]
    assert tokens_of(requests) == without_cache([prompt, other, prompt])


def test_generated_tokens_are_shared_too() -> None:
    """As a conversation goes on, its next prompt begins with the last one and the answer."""
    (prompt,) = draw(1, 10)
    engine = engine_of()
    (first,) = run(engine, [prompt])
    longer = [*prompt, *first.token_ids, 5, 6]
    (second,) = run(engine, [longer])
    assert second.num_cached_tokens == 16  # 17 of 18 tokens were consumed, 16 of them in full blocks
    assert tokens_of([second]) == without_cache([longer])


def test_a_recycled_block_is_no_hit_any_more() -> None:
    first, second = draw(2, 28)
    requests = run(engine_of(num_blocks=9), [first, second, first], at_once=False)
    assert cached(requests) == [0, 0, 0]
    assert tokens_of(requests) == without_cache([first, second, first])


def test_the_least_recently_used_goes_first() -> None:
    """Three prompts of 4 full blocks fit; using the first again saves it from the fourth."""
    prompts = draw(4, 17)
    a, b, c, d = prompts
    requests = run(engine_of(num_blocks=15), [a, b, c, a, d, a, b], at_once=False, max_tokens=1)
    assert cached(requests)[3] == 16 and cached(requests)[5] == 16
    assert (cached(requests)[6] or 0) < 16


@pytest.mark.parametrize("at_once", [True, False])
def test_shared_tokens_are_computed_once(at_once: bool) -> None:
    """16 requests with 64 tokens in common and 6 of their own, together or one after another."""
    common, own = draw(1, 64)[0], draw(16, 6, seed=1)
    engine = engine_of(num_blocks=512, max_num_seqs=16, max_num_batched_tokens=32)
    requests = run(engine, [common + tail for tail in own], at_once)
    assert tokens_of(requests) == without_cache([common + tail for tail in own])
    assert sum(stats.prefill_tokens for stats in engine.run_stats) == 64 + 16 * 6
    assert cached(requests) == [0] + [64] * 15


def test_a_collision_of_all_hashes_gives_no_wrong_hit(monkeypatch) -> None:
    monkeypatch.setattr(prefix_cache, "_mix", lambda word: jnp.zeros_like(word, jnp.uint32))
    prompts = [common + tail for common in draw(3, 9, seed=3) for tail in draw(3, 8, seed=4)]
    requests = run(engine_of(), prompts, at_once=False)
    assert tokens_of(requests) == without_cache(prompts)


def test_a_collision_of_all_hashes_keeps_salts_apart(monkeypatch) -> None:
    monkeypatch.setattr(prefix_cache, "_mix", lambda word: jnp.zeros_like(word, jnp.uint32))
    (prompt,) = draw(1, 20)
    engine = engine_of()
    hits = [hit_with_salt(engine, prompt, salt) for salt in ("a", "b", "a")]
    assert hits == [0, 0, 4]  # all keys are one, so one block alone is registered


def test_a_hit_after_preemption() -> None:
    """The last sequence is preempted when blocks are short; what it had computed is found again where it was left."""
    events: list[Event] = []
    prompts = draw(2, 12)
    engine = engine_of(events, num_blocks=9, max_num_seqs=2)
    requests = run(engine, prompts, max_tokens=16)
    assert tokens_of(requests) == without_cache(prompts, max_tokens=16)
    preempted = [event.seq for event in events if isinstance(event, Preempted)]
    assert preempted and {event.seq for event in events if isinstance(event, CacheHit)} <= set(preempted)
    assert any(isinstance(event, CacheHit) for event in events)
    assert cached(requests) == [0, 0]  # at the first admission


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"temperature": 0.9, "seed": 5, "top_k": 20},
    ],
)
def test_what_sampling_knows_of_a_cached_prompt(params: dict[str, Any]) -> None:
    prompts = draw(1, 22) * 3
    assert tokens_of(run(engine_of(), prompts, at_once=False, **params)) == without_cache(prompts, **params)


def test_salts_are_kept_apart() -> None:
    (prompt,) = draw(1, 20)
    engine = engine_of()
    hits = [hit_with_salt(engine, prompt, salt) for salt in (None, "a", "a", "b", None, "b")]
    assert hits == [0, 0, 16, 0, 16, 16]


@pytest.mark.parametrize("salt", ["", 3, b"a"])
def test_what_is_no_salt(salt: Any) -> None:
    with pytest.raises(ValueError, match="cache_salt must be text"):
        engine_of().add_request([1], SamplingParams(), cache_salt=salt)


def test_reset_prefix_cache() -> None:
    prompts = draw(1, 20)
    engine = engine_of()
    assert cached(run(engine, prompts)) == [0]
    engine.reset_prefix_cache()
    assert cached(run(engine, prompts)) == [0]
    assert cached(run(engine, prompts)) == [16]


def test_new_weights_find_nothing() -> None:
    prompts = draw(1, 20)
    engine = engine_of()
    run(engine, prompts)
    other = random_model(MODEL_CONFIG, seed=77)
    engine.update_weights(nnx.state(other))
    requests = run(engine, prompts)
    assert cached(requests) == [0]
    config = engine_config(block_size=4, max_model_len=128, enable_prefix_caching=False)
    assert tokens_of(requests) == tokens_of(run(Engine(other, MODEL_CONFIG, config), prompts))


def test_without_prefix_caching_nothing_is_shared() -> None:
    requests = run(engine_of(enable_prefix_caching=False), draw(1, 20) * 2, at_once=False)
    assert cached(requests) == [0, 0]


def test_an_abort_takes_nothing_from_those_that_share() -> None:
    common = draw(1, 40)[0]
    expected = without_cache([[*common, 9]], max_tokens=20)
    engine = engine_of(num_blocks=40)
    run(engine, [common])
    first = engine.add_request([*common, 8], SamplingParams(**{**GREEDY, "max_tokens": 20}))
    second = engine.add_request([*common, 9], SamplingParams(**{**GREEDY, "max_tokens": 20}))
    engine.run(2)
    engine.run(2)
    assert first.num_cached_tokens == second.num_cached_tokens == 40
    assert engine.abort(first.seq)
    while engine.has_unfinished_requests():
        engine.run()
    assert tokens_of([second]) == expected
    pool = engine._state.block_pool
    assert int(pool.num_free) == 40 and not np.asarray(pool.holders).any()


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_enable_prefix_caching_is_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        engine_config(enable_prefix_caching=value)
