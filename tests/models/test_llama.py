"""The model against torch's logits, and the properties that the engine relies on."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import checkpoints
from jaxpaged.models import Llama, ModelConfig, causal_attend, from_params, param_shapes, random_model

GOLDEN = Path(__file__).parents[1] / "golden"
VARIANTS = ["tied", "untied", "biases"]

CONFIG = ModelConfig(
    family="llama", vocab_size=101, hidden_size=32, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=64, attention_bias=True, mlp_bias=True,
)  # fmt: skip


@jax.jit
def forward(model: Llama, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = model(tokens, positions, causal_attend(positions))
    return hidden, model.logits(hidden)


def logits(model: Llama, tokens, positions=None) -> np.ndarray:
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(len(tokens)) if positions is None else jnp.asarray(positions)
    return np.asarray(forward(model, tokens, positions)[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_torch(variant):
    config, model = checkpoints.load(GOLDEN / f"llama_{variant}", np.float32)
    golden = np.load(GOLDEN / f"llama_{variant}" / "logits.npz")
    sequences = [golden[f"tokens_{i}"] for i in range(len(golden.files) // 2)]
    longest = max(map(len, sequences))
    for i, tokens in enumerate(sequences):
        padding = (0, longest - len(tokens))  # all of one shape, so that one compile serves them
        ours = logits(model, np.pad(tokens, padding), np.pad(np.arange(len(tokens)), padding, constant_values=-1))
        np.testing.assert_allclose(ours[: len(tokens)], golden[f"logits_{i}"], atol=1e-4, rtol=0)
    assert longest == 100 and config.num_kv_heads < config.num_heads


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_is_close_to_float32_and_logits_are_float32(tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    model, exact = random_model(config, 3, jnp.bfloat16), random_model(config, 3, jnp.float32)
    tokens = jnp.arange(20)
    hidden, ours = forward(model, tokens, tokens)
    assert (hidden.shape, hidden.dtype) == ((20, 32), jnp.bfloat16)
    assert (ours.shape, ours.dtype) == ((20, 101), jnp.float32)
    expected = logits(exact, tokens)
    assert np.abs(ours - expected).max() < 0.05 * np.abs(expected).max()
    # Accumulated in f32: far more exact than one rounding to bf16 of the same products.
    head = model.embedding.table[...].T if tied else model.head.kernel[...]
    same = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    np.testing.assert_allclose(ours, same, atol=1e-5 * np.abs(same).max(), rtol=0)


def test_only_attend_relates_rows():
    model = random_model(CONFIG)

    @jax.jit
    def each_row_to_itself(tokens, positions):
        return model(tokens, positions, lambda layer, q, k, v: jnp.repeat(v, q.shape[1] // v.shape[1], axis=1))

    tokens, positions = jnp.array([5, 6, 7, 8]), jnp.array([0, 9, 3, 3])
    together = each_row_to_itself(tokens, positions)
    for row in range(4):
        alone = each_row_to_itself(tokens[row : row + 1], positions[row : row + 1])
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


def test_a_nan_row_reaches_only_the_rows_that_see_it():
    model, clean = random_model(CONFIG), random_model(CONFIG)
    model.embedding.table[...] = model.embedding.table[...].at[50].set(jnp.nan)
    tokens, positions = [1, 2, 3, 50, 4, 5], np.arange(6)
    seen = logits(model, tokens, positions)
    assert np.isnan(seen).any(axis=1).tolist() == [False, False, False, True, True, True]
    np.testing.assert_array_equal(seen[:3], logits(clean, tokens, positions)[:3])
    # As padding it has a negative position, and nobody sees it.
    padded = logits(model, tokens, np.array([0, 1, 2, -1, 3, 4]))
    assert np.isnan(padded).any(axis=1).tolist() == [False, False, False, True, False, False]
    without = logits(clean, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(padded[[0, 1, 2, 4, 5]], without, atol=1e-5)


def test_rows_may_come_in_any_order_and_far_from_zero():
    model = random_model(CONFIG)
    tokens, order = np.array([9, 8, 7, 6, 5]), np.array([3, 0, 4, 1, 2])
    straight = logits(model, tokens)
    np.testing.assert_allclose(logits(model, tokens[order], order), straight[order], atol=1e-5)
    # Rotary attention depends on distances alone, and no table ends at max_position_embeddings.
    np.testing.assert_allclose(logits(model, tokens, np.arange(5) + 5000), straight, atol=1e-2)


def test_a_longer_distance_changes_the_result():
    model = random_model(CONFIG)
    assert np.abs(logits(model, [1, 2], [0, 1]) - logits(model, [1, 2], [0, 3])).max() > 1e-3


def test_kernels_are_stored_for_x_at_kernel_and_every_tensor_is_random():
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in param_shapes(CONFIG, jnp.float32).items()}
    assert shapes["layers.1.mlp.up.kernel"] == (32, 40)
    assert shapes["layers.1.mlp.down.kernel"] == (40, 32)
    assert shapes["layers.0.attention.key.kernel"] == (32, 16)
    assert shapes["head.kernel"] == (32, 101)
    assert len(shapes) == 2 * (2 + 7 * 2) + 3
    for seed in (0, 1):
        leaves = jax.tree.leaves(nnx.split(random_model(CONFIG, seed))[1])
        assert len(leaves) == len(shapes) and all(leaf.std() > 0 for leaf in leaves)
    first, again, other = (logits(random_model(CONFIG, seed), [1, 2]) for seed in (0, 0, 1))
    assert (first == again).all() and np.abs(first - other).max() > 0.1


def test_attend_is_called_once_per_layer_in_order():
    calls = []

    def attend(layer, q, k, v):
        calls.append((layer, q.shape, k.shape, v.shape))
        return q

    jax.eval_shape(lambda: random_model(CONFIG)(jnp.arange(3), jnp.arange(3), attend))
    assert calls == [(layer, (3, 6, 8), (3, 2, 8), (3, 2, 8)) for layer in range(2)]


def test_from_params_refuses_what_does_not_fit():
    shapes = param_shapes(CONFIG, jnp.float32)
    params = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
    from_params(CONFIG, jnp.float32, params)
    path = ("layers", 1, "mlp", "up", "kernel")
    for bad in (
        {key: value for key, value in params.items() if key != path},
        params | {path: params[path].T},
        params | {path: params[path].astype(jnp.bfloat16)},
        params | {(*path[:-1], "kernels"): params[path]},
    ):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up\.kernel"):
            from_params(CONFIG, jnp.float32, bad)
