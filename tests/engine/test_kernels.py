"""The whole engine on the kernels, interpreted: the same tokens as on the reference."""

from dataclasses import replace

import pytest

from jaxpaged.engine.engine import Engine
from jaxpaged.models import random_model
from tests.engine.small import MODEL_CONFIG, engine_config, run_all

CONFIG = replace(MODEL_CONFIG, head_dim=64)
# Chunks, several sequences at once, and a pool in which sequences are preempted.
SIZES = engine_config(num_blocks=7, block_size=16, max_num_batched_tokens=24, max_num_seqs=4, tile_q=8)


@pytest.mark.parametrize("implementation", ["tpu_interpret", "gpu_interpret"])
def test_the_tokens_are_the_references(implementation: str) -> None:
    model = random_model(CONFIG, seed=3)
    outputs = [
        [request.token_ids for request in run_all(Engine(model, CONFIG, SIZES, attention_implementation=name))]
        for name in ("reference", implementation)
    ]
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) == len(outputs[0])


def test_a_kernel_that_does_not_take_the_shape_is_not_replaced() -> None:
    with pytest.raises(NotImplementedError, match="head_dim 8"):
        Engine(random_model(MODEL_CONFIG), MODEL_CONFIG, SIZES, attention_implementation="tpu")
