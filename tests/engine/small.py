"""A small random Llama, and what it generates as a plain Flax model: no cache, no batch, no engine."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.requests import Request
from jaxpaged.models import random_model
from jaxpaged.models.attend import causal_attend
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Llama
from jaxpaged.sampling_params import SamplingParams

MODEL_CONFIG = ModelConfig(
    family="llama",
    vocab_size=89,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=512,
)
MAX_TOKENS = 14
# Of one token, of a few, at the edges of blocks of 4 and 16, and longer than some budgets.
PROMPT_LENS = (6, 1, 16, 17, 45, 3, 31, 12)


@cache
def model() -> Llama:
    return random_model(MODEL_CONFIG, seed=10)


@cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(1, MODEL_CONFIG.vocab_size, length).tolist() for length in PROMPT_LENS]


@cache
def plain_outputs() -> list[list[int]]:
    """Greedy, one prompt at a time, the whole sequence through the model for each token."""
    plain = model()

    @jax.jit
    def best(tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.where(jnp.arange(len(tokens)) < length, jnp.arange(len(tokens)), -1)
        logits = plain.logits(plain(tokens, positions, causal_attend(positions))[length - 1][None])[0]
        top = jax.lax.top_k(logits, 2)[0]
        return jnp.argmax(logits), top[0] - top[1]

    outputs = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(MAX_TOKENS):
            padded = np.zeros(64, np.int32)
            padded[: len(tokens)] = tokens
            token, margin = best(padded, len(tokens))
            assert margin > 1e-3, "a near tie: choose another seed"
            tokens.append(int(token))
        outputs.append(tokens[len(prompt) :])
        assert 0 not in tokens, "token 0 stands for padding: choose another seed"
    return outputs


def engine_config(**sizes: object) -> EngineConfig:
    base = EngineConfig(
        num_blocks=64,
        block_size=16,
        max_num_seqs=4,
        max_num_waiting=16,
        max_num_batched_tokens=32,
        max_model_len=64,
        max_steps=64,
    )
    return replace(base, **sizes)


def run_all(engine: Engine, max_steps: int | None = None, **params: object) -> list[Request]:
    """Every prompt, greedily unless `params` say otherwise."""
    settings = {"temperature": 0.0, "max_tokens": MAX_TOKENS} | params
    requests = [engine.add_request(prompt, SamplingParams(**settings)) for prompt in prompts()]
    while engine.has_unfinished_requests():
        engine.run(max_steps)
    return requests
