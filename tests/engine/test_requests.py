"""Checked input: which prompts are refused and why, and how a request becomes rows of arrays."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.engine import Engine
from jaxpaged.engine.requests import Request, check_prompt, max_total_len, new_requests, why_refused
from jaxpaged.engine.sizes import engine_config as sized
from jaxpaged.engine.state import NO_TOKEN
from jaxpaged.sampling_params import SamplingParams
from tests.engine.small import MODEL_CONFIG, engine_config, model, plain_outputs, prompts

BAD_PROMPTS = {
    "empty": ([], "is empty"),
    "empty array": (np.zeros(0, np.int32), "is empty"),
    "negative": ([1, -1], r"\[1\] = -1 is outside the vocabulary of 89 tokens"),
    "too large": ([5, 6, 89], r"\[2\] = 89 is outside the vocabulary of 89 tokens"),
    "huge": ([2**70], r"\[0\] = 1180591620717411303424 is outside"),
    "huge array": (np.array([2**63], np.uint64), r"\[0\] = 9223372036854775808 is outside"),
    "float": ([1, 2.0], r"\[1\] must be an integer, not 2\.0"),
    "float array": (np.array([1.0, 2.0]), r"\[0\] must be an integer, not np\.float64\(1\.0\)"),
    "nan": ([float("nan")], r"\[0\] must be an integer, not nan"),
    "bool": ([1, True], r"\[1\] must be an integer, not True"),
    "bool array": (np.ones(2, bool), r"\[0\] must be an integer, not np\.True_"),
    "string": ([1, "2"], r"\[1\] must be an integer, not '2'"),
    "nested": ([[1, 2]], r"\[0\] must be an integer, not \[1, 2\]"),
    "None in a list": ([1, None], r"\[1\] must be an integer, not None"),
    "None": (None, "must be a sequence of token ids, not NoneType"),
    "text": ("1 2", "must be a sequence of token ids, not str"),
    "bytes": (b"12", "must be a sequence of token ids, not bytes"),
    "number": (5, "must be a sequence of token ids, not int"),
    "set": ({1, 2}, "must be a sequence of token ids, not set"),
    "generator": ((i for i in [1]), "must be a sequence of token ids, not generator"),
    "two axes": (np.ones((2, 3), int), r"must have one axis, not the shape \(2, 3\)"),
    "no axis": (np.array(3), r"must have one axis, not the shape \(\)"),
    "jax, two axes": (jnp.ones((1, 3), int), r"must have one axis, not the shape \(1, 3\)"),
}


@pytest.mark.parametrize(("prompt", "says"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts_are_refused(prompt: object, says: str) -> None:
    with pytest.raises(ValueError, match=rf"^prompt_token_ids ?{says}") as caught:
        check_prompt(prompt, MODEL_CONFIG.vocab_size)
    assert "\n" not in str(caught.value)


@given(
    st.lists(st.integers(0, 88), min_size=1, max_size=20), st.sampled_from([list, tuple, np.array, np.uint8, jnp.array])
)
def test_good_prompts_become_lists_of_ints(tokens: list[int], form) -> None:
    prompt = check_prompt(form(tokens), 89)
    assert prompt == tokens and all(type(token) is int for token in prompt)


def test_where_refusal_begins() -> None:
    """At max_model_len (the prompt and one token more), and at the pool (all but the last token)."""
    config = engine_config(block_size=16, num_blocks=3, max_model_len=64)

    def why(prompt_len: int, max_tokens: int) -> str | None:
        return why_refused(prompt_len, SamplingParams(max_tokens=max_tokens), config)

    assert why(64, 1) == "needs 65 tokens, max_model_len is 64"
    assert why(48, 1) is None and why(48, 2) == "needs 4 blocks, num_blocks is 3"
    assert why(1, 48) is None and why(1, 49) == "needs 4 blocks, num_blocks is 3"
    assert why(63, 2**31 - 1) == "needs 4 blocks, num_blocks is 3"
    assert why_refused(63, SamplingParams(max_tokens=99), engine_config(num_blocks=4)) is None
    assert max_total_len(10, SamplingParams(max_tokens=7), config) == 17
    assert max_total_len(10, SamplingParams(max_tokens=2**31 - 1), config) == 64


def test_a_request_as_rows() -> None:
    config = engine_config()
    params = [SamplingParams(temperature=t, max_tokens=3) for t in (0, 1e300)]
    requests = [
        Request(7, [1, 2, 3], params[0], seed=2**32 - 1, stop_ids=(2, 5), arrival_time=0.0),
        Request(8, [4], params[1], seed=0, stop_ids=(), arrival_time=0.0),
    ]
    new = new_requests(requests, [19, 0], width=4, config=config)
    assert new.row.tolist() == [19, 0, config.num_rows, config.num_rows]
    assert new.seq[:2].tolist() == [7, 8] and new.prompt_len.tolist() == [3, 1, 0, 0]
    assert new.tokens.shape == (4, config.max_model_len) and new.tokens[0, :4].tolist() == [1, 2, 3, 0]
    assert new.max_total_len[:2].tolist() == [6, 4]
    assert new.stop_ids[0].tolist() == [2, 5] + [NO_TOKEN] * 14 and set(new.stop_ids[1].tolist()) == {NO_TOKEN}
    assert (
        new.sampling.temperature[0] == 0
        and np.isfinite(new.sampling.temperature).all()
        and new.sampling.temperature[1] > 1e38
    )
    assert new.sampling.seed[:2].tolist() == [2**32 - 1, 0]


def test_a_refused_request_harms_no_other() -> None:
    """Bad ones come between good ones and while those run: the good ones get the tokens they would have had alone."""
    engine = Engine(model(), MODEL_CONFIG, engine_config(num_blocks=6, max_model_len=128))
    params = SamplingParams(temperature=0, max_tokens=14)
    too_long = [([1] * 128, "needs 129 tokens, max_model_len is 128"), ([1] * 90, "needs 7 blocks, num_blocks is 6")]

    def add_bad_ones() -> None:
        for prompt, says in BAD_PROMPTS.values():
            with pytest.raises(ValueError, match=says):
                engine.add_request(prompt, params)
        for prompt, says in too_long:
            with pytest.raises(ValueError, match=f"^a prompt of {len(prompt)} tokens is refused: it {says}$"):
                engine.add_request(prompt, params)

    requests = []
    for prompt in prompts():
        add_bad_ones()
        requests.append(engine.add_request(prompt, params))
    while engine.has_unfinished_requests():
        engine.run(3)
        add_bad_ones()
    assert [request.token_ids for request in requests] == plain_outputs()
    # A request that is well formed has an ID, also if it is refused; others have none.
    assert [request.seq for request in requests] == [2 + 3 * i for i in range(len(requests))]


@pytest.mark.parametrize("max_steps", [0, -1, 65, 1.5, True, "3"])
def test_a_run_has_a_number_of_steps(max_steps: object) -> None:
    engine = Engine(model(), MODEL_CONFIG, engine_config())
    with pytest.raises(ValueError, match="max_steps must be an integer from 1 to 64"):
        engine.run(max_steps)


@pytest.mark.parametrize("params", [None, {"max_tokens": 3}, SamplingParams])
def test_params_of_another_type_are_refused(params: object) -> None:
    engine = Engine(model(), MODEL_CONFIG, engine_config())
    for call in (engine.add_request, engine.check_request):
        with pytest.raises(ValueError, match="params must be SamplingParams"):
            call([1, 2], params)
    assert not engine.has_unfinished_requests()


def test_a_budget_that_memory_has_no_room_for() -> None:
    """Found before anything is compiled or allocated."""
    wide = replace(MODEL_CONFIG, max_position_embeddings=2**20, intermediate_size=10**6)
    with pytest.raises(ValueError, match="max_num_batched_tokens=1000000: the activations of a step of 1000000 tokens"):
        sized(
            wide,
            kv_dtype=jnp.float32,
            block_size=16,
            num_blocks=4,
            max_num_seqs=1,
            max_num_waiting=1,
            max_num_batched_tokens=10**6,
            max_model_len=None,
            schedule="mixed",
            max_steps=4,
        )
