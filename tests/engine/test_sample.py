"""The next token: greedy and drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.engine.engine import Engine
from jaxpaged.engine.sample import next_token
from jaxpaged.sampling_params import SamplingParams
from tests.engine.small import MODEL_CONFIG, engine_config, model, plain_outputs, prompts, run_all


def draw(logits: np.ndarray, temperature: float, seeds: np.ndarray, position: int = 0) -> np.ndarray:
    rows = len(seeds)
    return np.asarray(
        jax.jit(next_token)(
            jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1)),
            jnp.full(rows, temperature, jnp.float32),
            jnp.asarray(seeds, jnp.uint32),
            jnp.full(rows, position, jnp.int32),
        )
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_drawn_tokens_follow_the_distribution(temperature: float) -> None:
    """Pearson's chi-square over 20,000 seeds, 7 degrees of freedom; 24.3 is passed by chance once in a thousand."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0])
    tokens = draw(logits, temperature, np.arange(20_000))
    expected = np.exp(logits / temperature)
    expected *= len(tokens) / expected.sum()
    counts = np.bincount(tokens, minlength=len(logits))
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_positions_draw_apart() -> None:
    logits, seeds = np.zeros(1000), np.arange(64)
    assert (draw(logits, 1.0, seeds, 0) != draw(logits, 1.0, seeds, 1)).mean() > 0.9


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-38])
def test_no_temperature_is_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal(5000) * 30
    assert set(draw(logits, temperature, np.arange(8)).tolist()) == {int(logits.argmax())}


def test_a_greedy_row_is_greedy_beside_a_drawn_one() -> None:
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((2, 50)), jnp.float32)
    tokens = next_token(logits, jnp.array([0.0, 5.0]), jnp.array([1, 2], jnp.uint32), jnp.array([0, 0]))
    assert int(tokens[0]) == int(logits[0].argmax())


def test_a_seed_draws_the_same_alone_in_a_batch_and_after_preemption() -> None:
    params = {"temperature": 0.9, "seed": 11}
    roomy = Engine(model(), MODEL_CONFIG, engine_config())
    batch = [request.token_ids for request in run_all(roomy, **params)]
    alone = []
    for prompt in prompts():
        request = roomy.add_request(prompt, SamplingParams(max_tokens=14, **params))
        while roomy.has_unfinished_requests():
            roomy.run(3)
        alone.append(request.token_ids)
    assert alone == batch != plain_outputs()
    scarce = Engine(model(), MODEL_CONFIG, engine_config(block_size=2, num_blocks=30, max_num_batched_tokens=7))
    assert [request.token_ids for request in run_all(scarce, 5, **params)] == batch


def test_requests_without_a_seed_draw_from_the_engines() -> None:
    config = engine_config()
    first, again, other = (
        [r.token_ids for r in run_all(Engine(model(), MODEL_CONFIG, config, seed=seed), temperature=1.0)]
        for seed in (5, 5, 6)
    )
    assert first == again != other
