"""Greedy output is the plain model's whatever the blocks, the budget, the pool, the policy and the length of a run."""

import itertools

import pytest

from jaxpaged.engine.engine import Engine
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.trace import Event, Preempted, check_events
from tests.engine.small import MAX_TOKENS, MODEL_CONFIG, engine_config, model, plain_outputs, prompts, run_all

BLOCK_SIZES = (1, 4, 16, 256)
BUDGETS = (1, 7, 32, 4096)
LONGEST = 45 + 14  # prompt and output


@pytest.mark.parametrize(("block_size", "budget"), list(itertools.product(BLOCK_SIZES, BUDGETS)))
def test_block_size_and_budget(block_size: int, budget: int) -> None:
    # Half of the cases under each policy, and under a pool in which preemption is usual.
    nth = BLOCK_SIZES.index(block_size) + BUDGETS.index(budget)
    plenty, scarce = 8 * -(-LONGEST // block_size), -(-LONGEST // block_size) + 1
    config = engine_config(
        block_size=block_size,
        max_num_batched_tokens=budget,
        num_blocks=scarce if nth % 2 else plenty,
        schedule="prefill_first" if BUDGETS.index(budget) % 2 else "mixed",
        max_num_seqs=4 if nth % 2 else 8,
    )
    events: list[Event] = []
    engine = Engine(model(), MODEL_CONFIG, config, trace=events.append)
    for max_steps in (1, 5, 64):
        engine.abort_all()
        assert [request.token_ids for request in run_all(engine, max_steps)] == plain_outputs()
    assert not check_events(
        events,
        block_size=block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
    )


@pytest.mark.parametrize("schedule", ["mixed", "prefill_first"])
def test_a_pool_that_preempts_all_the_time(schedule: str) -> None:
    config = engine_config(block_size=2, num_blocks=-(-LONGEST // 2), max_num_seqs=8, schedule=schedule)
    events: list[Event] = []
    engine = Engine(model(), MODEL_CONFIG, config, trace=events.append)
    assert [request.token_ids for request in run_all(engine)] == plain_outputs()
    assert sum(isinstance(event, Preempted) for event in events) >= 4


def test_more_requests_than_the_device_has_places_for() -> None:
    """They wait on the host, in order, and each row of the table is used again."""
    engine = Engine(model(), MODEL_CONFIG, engine_config(max_num_seqs=2, max_num_waiting=1))
    for max_steps in (3, 64):
        requests = run_all(engine, max_steps)
        assert [request.token_ids for request in requests] == plain_outputs()
        assert [request.first_token_time for request in requests] == sorted(r.first_token_time for r in requests)


def test_requests_that_come_while_others_run() -> None:
    engine = Engine(model(), MODEL_CONFIG, engine_config())
    early = [engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)) for prompt in prompts()]
    for _ in range(3):
        engine.run(2)
    late = run_all(engine, 2)
    assert [request.token_ids for request in early + late] == plain_outputs() * 2
