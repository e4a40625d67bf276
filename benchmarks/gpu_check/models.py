"""Models of real sizes with random weights, drawn on the device: numpy would take longer than the check may."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.models import Llama, ModelConfig, from_params, param_shapes

TINY = ModelConfig(
    family="llama",
    vocab_size=307,
    hidden_size=48,
    intermediate_size=64,
    num_layers=1,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def random_model(config: ModelConfig, dtype: jnp.dtype, seed: int = 0) -> Llama:
    """Every tensor is random and activations stay of order 1, as in `jaxpaged.models.random_model`, but for embeddings.

    Those are small. With tied ones of order 1 the last token's own logit would beat all others: a model that repeats
    its last token for ever gives the right answer whatever its attention does.
    """
    shapes = param_shapes(config, dtype)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    params = {
        path: _draw(key, leaf.shape, leaf.dtype, path[-1])
        for key, (path, leaf) in zip(keys, shapes.items(), strict=True)
    }
    return from_params(config, dtype, params)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, kind: str) -> Float[Array, "..."]:
    values = jax.random.normal(key, shape, jnp.float32)
    if kind == "scale":
        values = 1 + values / 4
    elif kind == "kernel":
        values /= shape[0] ** 0.5
    elif kind == "bias":
        values /= 4
    elif kind == "table":
        values /= 8
    return values.astype(dtype)
