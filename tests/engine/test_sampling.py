"""Sampling parameters: against transformers' processors, against plain numpy, and through the whole engine."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.engine.columns import pack
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.filters import filter_logits
from jaxpaged.engine.logits import Rows, adjust
from jaxpaged.engine.requests import Request, new_requests
from jaxpaged.engine.sample import next_token
from jaxpaged.engine.state import RequestTable, enqueue, init_scheduler
from jaxpaged.sampling_params import SamplingParams
from tests.engine.small import MODEL_CONFIG, engine_config, model, plain_outputs, prompts, run_all
from tests.engine.test_sample import sampling

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "processors.npz")
SETS = json.loads(str(GOLDEN["params"]))
CONFIG = engine_config(max_num_seqs=64, max_num_waiting=400)


def table_of(tokens: np.ndarray, prompt_len: int, params: list[SamplingParams], stop_ids: list[int]) -> RequestTable:
    """A row for each of `params`, with the prompt and the output so far."""
    requests = [
        Request(i, row[:prompt_len].tolist(), own, seed=i, stop_ids=tuple(stop_ids), arrival_time=0)
        for i, (row, own) in enumerate(zip(tokens, params, strict=True))
    ]
    empty, *_ = init_scheduler(CONFIG)
    table = enqueue(empty, new_requests(requests, range(len(requests)), len(requests), CONFIG), 0)
    table = replace(table, tokens=table.tokens.at[: len(tokens), : tokens.shape[1]].set(tokens))
    rows = replace(table[jnp.arange(len(tokens))], total_len=jnp.full(len(tokens), tokens.shape[1]))
    return table.write(jnp.arange(len(tokens)), rows)


def rows_of(table: RequestTable, count: int) -> Rows:
    return Rows.of(table, jnp.arange(count), jnp.ones(count, bool))


@jax.jit
def processed(logits: jax.Array, table: RequestTable) -> jax.Array:
    """As `next_token` has them before the noise; the greatest of each row is 0."""
    rows = rows_of(table, len(logits))
    logits = adjust(logits, table, rows)
    return filter_logits(
        (logits - logits.max(axis=1, keepdims=True)) / rows.sampling.temperature[:, None], rows.sampling
    )


def test_400_sets_of_parameters_agree_with_transformers() -> None:
    sets = SETS["sets"]
    index = [own["row"] for own in sets]
    params = [
        SamplingParams(
            **{name: value for name, value in own.items() if name not in ("row", "logit_bias")},
            logit_bias={int(token): bias for token, bias in own.get("logit_bias", {}).items()},
            max_tokens=100,
        )
        for own in sets
    ]
    table = table_of(GOLDEN["tokens"][index], SETS["prompt_len"], params, SETS["stop_ids"])
    ours, theirs = np.array(processed(GOLDEN["logits"][index], table)), GOLDEN["scores"]
    for mine, other, own in zip(ours, theirs, sets, strict=True):
        assert np.array_equal(np.isfinite(mine), np.isfinite(other)), own
        kept = np.isfinite(other)
        np.testing.assert_allclose(mine[kept], other[kept] - other[kept].max(), atol=2e-4, err_msg=str(own))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 60),
    st.floats(0.01, 1),
    st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    st.booleans(),
)
def test_the_filters_are_their_definition(seed: int, top_k: int, top_p: float, min_p: float, ties: bool) -> None:
    """In float64, by sorting; rows with ties, zeros of both signs and left-out tokens, too."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((4, 50)).astype(np.float32) * 3
    if ties:
        logits = np.round(logits)
        logits[0, ::2] = -np.inf
        logits[1, :25] *= np.float32(0)
    logits -= logits.max(axis=1, keepdims=True)
    own = sampling(4, temperature=1, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = np.isfinite(np.array(jax.jit(filter_logits)(logits, own)))
    for mine, row in zip(ours, logits.astype(np.float64), strict=True):
        weights = np.where(np.exp(row) >= min_p - 1e-9, np.exp(row), 0)
        weights = np.where(weights >= np.sort(weights)[-min(top_k, 50)], weights, 0)
        above = np.array([weights[weights > weight].sum() for weight in weights]) / weights.sum()
        # Within rounding of the share either is right.
        sure = (np.abs(above - top_p) > 1e-5) & (np.abs(np.exp(row) - min_p) > 1e-6)
        assert np.array_equal(mine[sure], ((weights > 0) & (above < top_p))[sure])


def test_penalties_are_vllms() -> None:
    """Against numpy: repetition over prompt and output, then frequency and presence over the output."""
    rng = np.random.default_rng(6)
    tokens, logits = rng.integers(0, 12, (16, 30)).astype(np.int32), rng.standard_normal((16, 12)).astype(np.float32)
    logits[:, 0] = -np.inf
    params = [
        SamplingParams(
            repetition_penalty=float(rng.uniform(0.5, 2)),
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
        )
        for _ in tokens
    ]
    table = table_of(tokens, 8, params, [])
    ours = np.array(jax.jit(lambda logits, table: adjust(logits, table, rows_of(table, 16)))(logits, table))
    for mine, row, own_tokens, own in zip(ours, logits.astype(np.float64), tokens, params, strict=True):
        expected = row.copy()
        for token in set(own_tokens.tolist()):
            expected[token] *= own.repetition_penalty if row[token] <= 0 else 1 / own.repetition_penalty
        count = np.bincount(own_tokens[8:], minlength=12)
        expected -= own.frequency_penalty * count + own.presence_penalty * (count > 0)
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_drawn_tokens_follow_the_filtered_distribution() -> None:
    """Pearson's chi-square over 20,000 seeds and the tokens that are left; 18.5 with 4 degrees of freedom."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0, 2.2], np.float32)
    params = SamplingParams(temperature=0.8, top_k=7, top_p=0.95, allowed_token_ids=[0, 1, 2, 3, 4, 5, 6, 7])
    count = 20_000
    table = table_of(np.zeros((400, 2), np.int32), 1, [params] * 400, [])
    rows = rows_of(table, 400)

    @jax.jit
    def draw(seeds: jax.Array) -> jax.Array:
        packed = pack(replace(rows.sampling, seed=seeds), axis=-1)
        return next_token(jnp.tile(logits, (400, 1)), table, rows._replace(packed=packed))

    seeds = np.arange(count, dtype=np.uint32).reshape(-1, 400)
    tokens = np.concatenate([np.array(draw(own)) for own in seeds])
    weights = np.exp(np.where(np.arange(9) < 8, logits, -np.inf).astype(np.float64) / 0.8)
    weights[weights < np.sort(weights)[-7]] = 0
    order = np.argsort(-weights)
    weights[order[1:][np.cumsum(weights[order])[:-1] >= 0.95 * weights.sum()]] = 0
    expected, counts = weights * count / weights.sum(), np.bincount(tokens, minlength=9)
    assert (weights > 0).sum() == 5 and counts[weights == 0].sum() == 0
    left = weights > 0
    assert ((counts - expected)[left] ** 2 / expected[left]).sum() < 18.5


# Through the engine


@cache
def shared_engine() -> Engine:
    """One for all, since each is a compile."""
    return Engine(model(), EOS_CONFIG, engine_config())


def outputs(prompt: int = 0, neighbours: tuple[SamplingParams, ...] = (), **params: object) -> Request:
    """The request of this prompt, greedy but for `params`, in a batch of `neighbours`."""
    engine = shared_engine()
    settings = {"temperature": 0.0, "max_tokens": 14} | params
    for i, own in enumerate(neighbours):
        engine.add_request(prompts()[i + 1], own)
    request = engine.add_request(prompts()[prompt], SamplingParams(**settings))
    while engine.has_unfinished_requests():
        engine.run(5)
    return request


EOS = plain_outputs()[0][4]
EOS_CONFIG = replace(MODEL_CONFIG, eos_token_ids=(EOS,))


def test_stops() -> None:
    plain = plain_outputs()[0]
    end = plain.index(EOS) + 1
    other = next(token for token in plain if token != EOS)
    assert outputs().token_ids == plain[:end] and outputs().finish_reason == "stop"
    assert outputs(ignore_eos=True).token_ids == plain
    ended = outputs(ignore_eos=True, stop_token_ids=[other])
    assert (ended.token_ids, ended.finish_reason) == (plain[: plain.index(other) + 1], "stop")
    assert outputs(stop_token_ids=[plain[0]]).token_ids == plain[:1]


def test_min_tokens_puts_off_every_stop() -> None:
    for least in (1, 5, 6, 14):
        request = outputs(min_tokens=least, stop_token_ids=[plain_outputs()[0][0]])
        assert len(request.token_ids) >= least
        assert not {EOS, plain_outputs()[0][0]} & set(request.token_ids[:least])


def test_lists_decide_what_is_generated() -> None:
    assert set(outputs(allowed_token_ids=[7, 8], ignore_eos=True).token_ids) <= {7, 8}
    assert outputs(logit_bias={9: 100.0}).token_ids == [9] * 14
    assert outputs(allowed_token_ids=[7, 8], logit_bias={8: 100.0, 9: 100.0}).token_ids == [8] * 14
    plain = plain_outputs()[0]
    assert plain[0] not in outputs(logit_bias={plain[0]: -100.0}, ignore_eos=True).token_ids
    last = MODEL_CONFIG.vocab_size - 1  # where an unused place of a list would wrap round to
    assert outputs(logit_bias={5: 100.0, last: -100.0}).token_ids == [5] * 14


def test_neighbours_change_nothing() -> None:
    others = (
        SamplingParams(temperature=0.0, logit_bias={3: 100.0}),
        SamplingParams(temperature=2.0, top_k=10_000, top_p=0.5, min_p=0.1, seed=1),
        SamplingParams(temperature=1.0, repetition_penalty=1.5, min_tokens=16, seed=2),
    )
    assert outputs(neighbours=others, ignore_eos=True).token_ids == plain_outputs()[0]
    mine = {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 1.0, "seed": 9}
    assert outputs(neighbours=others, **mine).token_ids == outputs(**mine).token_ids


@pytest.mark.parametrize("top_k", [1, 3])
def test_top_k_through_the_engine(top_k: int) -> None:
    drawn = outputs(temperature=5.0, top_k=top_k, seed=3, ignore_eos=True).token_ids
    assert (drawn == plain_outputs()[0]) == (top_k == 1)


def test_penalties_hold_after_preemption() -> None:
    params = {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.7, "frequency_penalty": 0.5, "top_p": 0.9}
    roomy = [request.token_ids for request in run_all(Engine(model(), MODEL_CONFIG, engine_config()), **params)]
    scarce = Engine(model(), MODEL_CONFIG, engine_config(block_size=2, num_blocks=30, max_num_batched_tokens=7))
    assert [request.token_ids for request in run_all(scarce, 3, **params)] == roomy
    assert roomy != [request.token_ids for request in run_all(scarce, 3, temperature=0.7, seed=4, top_p=0.9)]


@cache
def small_lists_engine() -> Engine:
    return Engine(model(), MODEL_CONFIG, engine_config(max_listed_tokens=8))


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"stop_token_ids": [89]}, "stop_token_ids: 89 is outside the vocabulary of 89 tokens"),
        ({"allowed_token_ids": [1, 2**40]}, f"allowed_token_ids: {2**40} is outside the vocabulary of 89 tokens"),
        ({"logit_bias": {90: 1.0}}, "logit_bias: 90 is outside the vocabulary of 89 tokens"),
        ({"stop_token_ids": range(17)}, "stop_token_ids and EOS are 17 ids, max_stop_ids is 16"),
        ({"logit_bias": dict.fromkeys(range(9), 1.0)}, "logit_bias has 9 ids, max_listed_tokens is 8"),
        ({"allowed_token_ids": range(9)}, "allowed_token_ids has 9 ids, max_listed_tokens is 8"),
        (
            {"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1},
            "allowed_token_ids are stop ids alone, and min_tokens forbids these: nothing could be generated",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused(params: dict[str, object], line: str) -> None:
    engine = small_lists_engine()
    neighbour = engine.add_request(prompts()[0], SamplingParams(temperature=0, max_tokens=14))
    with pytest.raises(ValueError) as caught:
        engine.add_request(prompts()[1], SamplingParams(**params))
    assert str(caught.value) == line
    while engine.has_unfinished_requests():
        engine.run()
    assert neighbour.token_ids == plain_outputs()[0]
