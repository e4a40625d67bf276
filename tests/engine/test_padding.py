"""Padding rows never reach a real one, whatever stands in them."""

import jax.numpy as jnp
from flax import nnx

from jaxpaged.engine.engine import Engine
from tests.engine.small import MODEL_CONFIG, engine_config, model, plain_outputs, run_all


def test_nan_in_every_padding_row() -> None:
    """Padding rows hold token 0, which no prompt uses: its embedding is NaN here, and so are their keys and values."""
    graphdef, params = nnx.split(model())
    poisoned = nnx.merge(graphdef, params)
    poisoned.embedding.table[...] = poisoned.embedding.table[...].at[0].set(jnp.nan)
    engine = Engine(poisoned, MODEL_CONFIG, engine_config(max_num_seqs=5, max_num_batched_tokens=40))
    assert [request.token_ids for request in run_all(engine)] == plain_outputs()
    scratch = [array[engine.config.scratch_block] for pool in engine._state.kv for array in pool.arrays]
    assert all(bool(jnp.isnan(block).any()) for block in scratch)  # the poison was there
