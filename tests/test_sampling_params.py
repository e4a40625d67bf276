"""Which sampling parameters are refused, and that the line names the field."""

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.sampling_params import SamplingParams, is_int


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "max_tokens": (0, -1, 1.5, 16.0, True, None, "16", math.nan, 2**31, np.True_, [16]),
        "temperature": (-1, -1e-9, math.nan, math.inf, -math.inf, "1", b"1", None, True, 1j, [1.0], 10**400),
        "seed": (-1, 2**32, 1.5, "7", True, [7]),
        "ignore_eos": (0, 1, None, "yes", "False"),
        "top_k": (-2, 1.0, "3", True, None, 2**31, math.nan),
        "top_p": (0, -0.1, 1.01, math.nan, math.inf, "1", None, True),
        "min_p": (-0.1, 1.01, math.nan, "0", None, False),
        "repetition_penalty": (0, -1, 1e-300, 1e300, math.nan, math.inf, "1", None),
        "presence_penalty": (-2.1, 2.1, math.nan, -math.inf, "1", None),
        "frequency_penalty": (-2.1, 2.1, math.nan, math.inf, "1", None),
        "min_tokens": (-1, 17, 1.0, True, None, "2", 2**31),
        "stop_token_ids": ("12", b"12", 3, {1: 2}, iter([1])),
        "allowed_token_ids": ("12", 3, {1: 2}),
        "logit_bias": ([1, 2], 3, "1"),
        "stop": (3, b"x", {"a"}),
        "include_stop_str_in_output": (0, None, "yes"),
    }.items(),
)
def test_bad_values_are_refused_by_name(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError) as caught:
            SamplingParams(**{field: value})
        line = str(caught.value)
        assert line.startswith(f"{field} must be ") and "\n" not in line
        assert line.endswith(f"not {value!r}")


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"stop_token_ids": [1, -1]}, "stop_token_ids: -1 is not a token id"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids: 1.0 is not a token id"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids: [1] is not a token id"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids: True is not a token id"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty: nothing could be generated"),
        ({"stop": ["a", ""]}, "stop: a stop string has 1 to 1000 characters, not ''"),
        ({"stop": ["a", 3]}, "stop: a stop string has 1 to 1000 characters, not 3"),
        ({"stop": ["a"] * 17}, "stop must be at most 16 strings, not 17"),
        ({"logit_bias": {"a": 1}}, "logit_bias: 'a' is not a token id"),
        ({"logit_bias": {1: math.nan}}, "logit_bias[1] must be a number from -100 to 100, not nan"),
        ({"logit_bias": {1: 100.5}}, "logit_bias[1] must be a number from -100 to 100, not 100.5"),
        ({"logit_bias": {1: None}}, "logit_bias[1] must be a number from -100 to 100, not None"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most max_tokens, 8, not 9"),
    ],
)
def test_bad_lists_and_pairs_are_refused(params: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**params)
    assert str(caught.value) == line


def test_lists_are_copied() -> None:
    stop, allowed, bias = [1, 2], np.array([3, 3]), {np.int64(4): 5}
    params = SamplingParams(stop_token_ids=stop, allowed_token_ids=allowed, logit_bias=bias)
    stop.append(-1)
    allowed[0] = -1
    bias[6] = math.nan
    assert (params.stop_token_ids, params.allowed_token_ids, dict(params.logit_bias)) == ((1, 2), (3, 3), {4: 5.0})
    with pytest.raises(TypeError):
        params.logit_bias[1] = 2


def test_what_the_model_is_told_of_tokens() -> None:
    assert SamplingParams(logit_bias={1: 2.0}).listed_tokens == {1: 2.0}
    both = SamplingParams(logit_bias={1: 2.0, 5: 1.0}, allowed_token_ids={1, 7})
    assert both.listed_tokens == {1: 2.0, 7: 0.0}


@given(
    st.floats(0, 1e300) | st.integers(0, 10) | st.floats(0, 100, width=32).map(np.float32),
    st.integers(1, 2**31 - 1),
    st.none() | st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_good_values_are_taken(temperature, max_tokens, seed, ignore_eos) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    assert (params.temperature, params.max_tokens, params.seed, params.ignore_eos) == (
        temperature,
        max_tokens,
        seed,
        ignore_eos,
    )


def test_integers_of_numpy_are_integers() -> None:
    assert SamplingParams(max_tokens=np.int64(3), seed=np.uint32(2**32 - 1)).max_tokens == 3
    for value, expected in [(3, True), (np.int8(3), True), (np.array(3), True), (True, False), (np.True_, False)]:
        assert is_int(value) is expected
    for value in (3.0, np.float32(3), "3", None, Fraction(3), [3], np.array([3, 4])):
        assert not is_int(value)


def test_keywords_alone_and_only_known_ones() -> None:
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_what_was_checked_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().max_tokens = 0  # type: ignore[misc]
