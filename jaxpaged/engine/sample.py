"""Choose the next token of each row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32


def sample(
    logits: Float[Array, "N V"],
    temperature: Float[Array, " N"],
    seed: UInt32[Array, " N"],
    output_position: Int32[Array, " N"],
) -> Int32[Array, " N"]:
    """The most likely token where the temperature is 0, else one drawn from softmax(logits / temperature).

    Drawn with the Gumbel-max trick: argmax(logits / temperature + Gumbel noise). The noise depends on the row's seed and
    the position of its token in the output alone, so neighbours, slots and chunks never change what is drawn.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int32[Array, " N"]:
        def noise(seed: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

        hot = temperature > 0
        # Less the maximum, so that a tiny temperature overflows to -inf, which never wins, and not to +inf.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(hot, temperature, 1)[:, None]
        drawn = jnp.argmax(scaled + jax.vmap(noise)(seed, output_position), axis=-1).astype(jnp.int32)
        return jnp.where(hot, drawn, greedy)

    # A batch without a temperature does not pay for noise.
    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)
