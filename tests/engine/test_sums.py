"""Sums along candidates, packed columns, and the most blocks that a step hands out."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine.columns import num_columns, pack, unpack
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.sampling import Sampling
from jaxpaged.engine.schedule import make_schedule, most_new_blocks
from jaxpaged.engine.state import NewRequests, enqueue, init_state
from jaxpaged.engine.sums import cumsum, cumsums, exclusive_cumsum, pick


@dataclass(frozen=True)
class Table:
    first: Int32[Array, " *N"]
    flag: Bool[Array, " *N"]
    last: Int32[Array, " *N"]


@pytest.mark.parametrize("axis", [-1, -2])
def test_columns_come_back_by_name_on_the_device_and_on_the_host(axis: int) -> None:
    first, last = np.array([3, -(2**31), 2**31 - 1], np.int32), np.array([0, 1, -1], np.int32)
    flag = np.array([True, False, True])
    packed = pack(Table(jnp.asarray(first), jnp.asarray(flag), jnp.asarray(last)), axis=axis)
    assert packed.shape[axis] == num_columns(Table) == 3
    for kept in (packed, np.asarray(packed)):
        table = unpack(Table, kept, axis=axis)
        for column, want in ((table.first, first), (table.flag, flag), (table.last, last)):
            assert column.dtype == want.dtype
            np.testing.assert_array_equal(column, want)


@pytest.mark.parametrize("size", [1, 2, 64, 257])
def test_sums_are_numpys(size: int) -> None:
    rng = np.random.default_rng(size)
    numbers, flags = rng.integers(-(2**20), 2**20, size).astype(np.int32), rng.random(size) < 0.5
    for got, want in zip(cumsums(jnp.asarray(numbers), jnp.asarray(flags)), (numbers, flags), strict=True):
        np.testing.assert_array_equal(got, np.cumsum(want))
    np.testing.assert_array_equal(cumsum(jnp.asarray(flags)), np.cumsum(flags))
    np.testing.assert_array_equal(exclusive_cumsum(jnp.asarray(numbers)), np.cumsum(numbers) - numbers)


def test_pick_takes_the_value_where_it_holds() -> None:
    at = jnp.array([[False, True, False], [False, False, False], [True, False, False]])
    np.testing.assert_array_equal(pick(at, jnp.array([7, -5, 9])), [-5, 0, 7])


CONFIG = EngineConfig(
    num_blocks=1000, block_size=4, max_num_seqs=6, max_num_waiting=6, max_num_batched_tokens=16, max_model_len=81
)


@given(st.lists(st.integers(1, 80), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_no_step_hands_out_more_than_the_most(prompt_lens: list[int]) -> None:
    assert new_blocks_of_first_step(prompt_lens) <= most_new_blocks(CONFIG)


def test_the_most_is_within_a_sixth_of_what_happens() -> None:
    """Five prompts that each begin a block, with one token of the budget left for a prompt of the greatest length."""
    happens = new_blocks_of_first_step([1, 5, 1, 5, 1, 80])
    assert happens == 1 + 2 + 1 + 2 + 1 + 20
    assert most_new_blocks(CONFIG) * 5 // 6 <= happens <= most_new_blocks(CONFIG)


def new_blocks_of_first_step(prompt_lens: list[int]) -> int:
    rows = CONFIG.num_rows
    lens = np.zeros(rows, np.int32)
    lens[: len(prompt_lens)] = prompt_lens
    row = np.where(lens > 0, np.arange(rows), rows).astype(np.int32)
    return int(_first_step(row, lens))


@jax.jit
def _first_step(row: jax.Array, lens: jax.Array) -> jax.Array:
    state = init_state(CONFIG, 0, 1, 1, jnp.float32)
    rows = CONFIG.num_rows
    new = NewRequests(
        row=row,
        seq=jnp.arange(rows),
        tokens=jnp.zeros((rows, CONFIG.max_model_len), jnp.int32),
        prompt_len=lens,
        max_total_len=lens + 1,
        stop_ids=jnp.zeros((rows, CONFIG.max_stop_ids), jnp.int32),
        cache_salt=jnp.zeros_like(lens),
        sampling=unpack(Sampling, jnp.zeros((rows, num_columns(Sampling)), jnp.int32), axis=-1),
        listed_ids=jnp.zeros((rows, CONFIG.max_listed_tokens), jnp.int32),
        listed_bias=jnp.zeros((rows, CONFIG.max_listed_tokens)),
    )
    requests = enqueue(state.requests, new, CONFIG.max_num_seqs)
    schedule = make_schedule(replace(state, requests=requests), CONFIG)
    return jnp.sum(schedule.new_blocks)
