"""An engine that compiles before it has weights, and one that is given other weights."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpaged.engine.engine import Engine
from jaxpaged.models import abstract_model, random_model
from tests.engine.small import MODEL_CONFIG, engine_config, model, plain_outputs, run_all
from tests.engine.test_counts import count_compiles


def tokens(engine: Engine) -> list[list[int]]:
    return [request.token_ids for request in run_all(engine)]


def test_weights_may_come_after_the_compile() -> None:
    engine = Engine(abstract_model(MODEL_CONFIG, jnp.float32), MODEL_CONFIG, engine_config())
    engine.warm_up()
    weights, expected = nnx.state(model()), plain_outputs()
    with count_compiles() as compiles:
        engine.update_weights(weights)
        assert tokens(engine) == expected
    assert not compiles


def test_other_weights_are_taken_without_a_compile() -> None:
    engine = Engine(model(), MODEL_CONFIG, engine_config())
    engine.warm_up()
    other = random_model(MODEL_CONFIG, seed=5)
    expected = tokens(Engine(other, MODEL_CONFIG, engine_config()))
    first = tokens(engine)
    with count_compiles() as compiles:
        engine.update_weights(nnx.state(other))
        assert tokens(engine) == expected != first
        engine.update_weights(nnx.state(model()))
        assert tokens(engine) == first
    assert not compiles


@pytest.mark.parametrize("change", ["shape", "dtype", "structure"])
def test_weights_of_another_model_are_refused(change: str) -> None:
    weights = nnx.state(random_model(MODEL_CONFIG, dtype=jnp.bfloat16 if change == "dtype" else jnp.float32))
    if change == "shape":
        weights["embedding"]["table"] = nnx.Param(jnp.zeros((2, 2)))
    if change == "structure":
        del weights["final_norm"]
    engine = Engine(model(), MODEL_CONFIG, engine_config())
    with pytest.raises(ValueError, match="not of the structure, shapes and dtypes of the model's own"):
        engine.update_weights(weights)
    assert tokens(engine) == plain_outputs()
