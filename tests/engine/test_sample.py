"""The next token: greedy and drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.engine.columns import pack
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.logits import Rows
from jaxpaged.engine.sample import next_token
from jaxpaged.engine.sampling import Sampling, greedy
from jaxpaged.engine.state import init_scheduler
from jaxpaged.sampling_params import SamplingParams
from tests.engine.small import MODEL_CONFIG, engine_config, model, plain_outputs, prompts, run_all


def sampling(rows: int, **columns: object) -> Sampling:
    """Greedy but for `columns`, each a value or one a row."""
    filled = {name: jnp.full(rows, value, value.dtype) for name, value in vars(greedy()).items()}
    own = {name: jnp.broadcast_to(jnp.asarray(value, filled[name].dtype), rows) for name, value in columns.items()}
    return Sampling(**filled | own)


def tokens_of(logits: np.ndarray, seeds: np.ndarray, position: int = 0, **columns: object) -> np.ndarray:
    """What one row of logits gives with each seed."""
    count = len(seeds)
    table, *_ = init_scheduler(engine_config())
    rows = Rows(
        row=jnp.zeros(count, jnp.int32),
        prompt_len=jnp.ones(count, jnp.int32),
        total_len=jnp.full(count, 1 + position),
        packed=pack(sampling(count, seed=seeds, **columns), axis=-1),
    )
    return np.asarray(jax.jit(next_token)(jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1)), table, rows))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_drawn_tokens_follow_the_distribution(temperature: float) -> None:
    """Pearson's chi-square over 20,000 seeds, 7 degrees of freedom; 24.3 is passed by chance once in a thousand."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0])
    tokens = tokens_of(logits, np.arange(20_000), temperature=temperature)
    expected = np.exp(logits / temperature)
    expected *= len(tokens) / expected.sum()
    counts = np.bincount(tokens, minlength=len(logits))
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_positions_draw_apart() -> None:
    logits, seeds = np.zeros(1000), np.arange(64)
    assert (tokens_of(logits, seeds, 0, temperature=1) != tokens_of(logits, seeds, 1, temperature=1)).mean() > 0.9


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-38])
def test_no_temperature_is_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal(5000) * 30
    assert set(tokens_of(logits, np.arange(8), temperature=temperature).tolist()) == {int(logits.argmax())}


def test_a_greedy_row_is_greedy_beside_a_drawn_one() -> None:
    logits = np.random.default_rng(1).standard_normal(50)
    tokens = tokens_of(logits, np.arange(8), temperature=[0.0, 5.0] * 4)
    assert set(tokens[::2].tolist()) == {int(logits.argmax())} and len(set(tokens[1::2].tolist())) > 1


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
