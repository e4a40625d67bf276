"""From how much of the vocabulary a token is drawn: min_p, top_k, top_p. No sort: a search for the threshold.

A float32's bits, taken as an integer, are in the order of the floats. So the greatest threshold at which a condition
still holds is found bit by bit, in 32 passes over the row, exactly.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from jaxpaged.engine.sampling import Sampling

_BITS = 32


def asks_for_filter(sampling: Sampling) -> Bool[Array, " N"]:
    return sampling.draws & ((sampling.min_p > 0) | (sampling.top_k > 0) | (sampling.top_p < 1))


def filter_logits(logits: Float[Array, "N V"], sampling: Sampling) -> Float[Array, "N V"]:
    """-inf for the tokens that are left out, in the order of vLLM: min_p, top_k, and top_p of what top_k left.

    logits: divided by the temperature, less the greatest of the row, which so is 0. Tokens as likely as the last one
    that stays stay, too. A row keeps its likeliest token always.
    """
    logits = jnp.where(logits >= jnp.log(sampling.min_p)[:, None], logits, -jnp.inf)
    keys = _in_order(logits)
    for asks, least in ((sampling.top_k > 0, _least_of_top_k), (sampling.top_p < 1, _least_of_top_p)):
        threshold = jax.lax.cond(jnp.any(asks), least, _least_of_all, logits, keys, sampling)
        logits = jnp.where(keys >= jnp.where(asks, threshold, 0)[:, None], logits, -jnp.inf)
    return logits


def _least_of_all(logits: Float[Array, "N V"], keys: UInt32[Array, "N V"], sampling: Sampling) -> UInt32[Array, " N"]:
    return jnp.zeros(len(logits), jnp.uint32)


def _least_of_top_k(logits: Float[Array, "N V"], keys: UInt32[Array, "N V"], sampling: Sampling) -> UInt32[Array, " N"]:
    """The k-th greatest key; 0 if there are not so many."""
    return _greatest(lambda threshold: jnp.sum(keys >= threshold[:, None], axis=1) >= sampling.top_k, len(keys))


def _least_of_top_p(logits: Float[Array, "N V"], keys: UInt32[Array, "N V"], sampling: Sampling) -> UInt32[Array, " N"]:
    """The greatest key such that all from it on have at least the share top_p."""
    weights = jnp.exp(logits)
    share = sampling.top_p * jnp.sum(weights, axis=1)
    return _greatest(
        lambda threshold: jnp.sum(jnp.where(keys >= threshold[:, None], weights, 0), axis=1) >= share, len(keys)
    )


def _greatest(holds: Callable[[Array], Array], num_rows: int) -> UInt32[Array, " N"]:
    """The greatest threshold for which `holds`, which holds up to some threshold and not above; 0 if for none."""

    def next_bit(i: Array, threshold: Array) -> Array:
        higher = threshold | (jnp.uint32(1) << (_BITS - 1 - i).astype(jnp.uint32))
        return jnp.where(holds(higher), higher, threshold)

    return jax.lax.fori_loop(0, _BITS, next_bit, jnp.zeros(num_rows, jnp.uint32))


def _in_order(x: Float[Array, "N V"]) -> UInt32[Array, "N V"]:
    """Integers in the order of the floats. -0 comes before 0: both are as likely, so it is made 0 first."""
    bits = jnp.where(x == 0, 0, x).view(jnp.uint32)
    is_negative = bits >> (_BITS - 1) == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << (_BITS - 1)))
