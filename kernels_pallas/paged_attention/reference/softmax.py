"""Online softmax (arXiv:1805.02867): attention over keys and values that come in parts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels_pallas.paged_attention.interface import LOWEST, Variant

# Not the default: a GPU would round float32 to 10 bits, a TPU to 8.
_PRECISION = jax.lax.Precision.HIGHEST


class Softmax(NamedTuple):
    """What is known of R rows of N tiles so far. `out` is not divided by `total` yet."""

    maximum: Float[Array, "N Hkv R"]
    total: Float[Array, "N Hkv R"]
    out: Float[Array, "N Hkv R D"]


def begin(queries: Float[Array, "N Hkv R D"], sinks: Float[Array, "Hkv R"] | None) -> Softmax:
    """Before the first key. A sink is a logit that is there already."""
    start = jnp.asarray(LOWEST, jnp.float32) if sinks is None else sinks
    maximum = jnp.broadcast_to(start, queries.shape[:-1])
    return Softmax(maximum, jnp.where(maximum > LOWEST, 1.0, 0.0), jnp.zeros(queries.shape, jnp.float32))


def absorb(
    softmax: Softmax,
    queries: Float[Array, "N Hkv R D"],
    k: Float[Array, "N Hkv D P"],
    v: Float[Array, "N Hkv P D"],
    sees: Bool[Array, "N #Hkv #R P"],
    variant: Variant,
) -> Softmax:
    """Take in P more positions. `k` may be NaN where nobody `sees` it, `v` may not: 0 * NaN is NaN."""
    maximum, total, out = softmax
    products = jnp.einsum("nhqd,nhds->nhqs", queries, k, precision=_PRECISION, preferred_element_type=jnp.float32)
    logits = jnp.where(sees, variant.logits(products), -jnp.inf)
    new_maximum = jnp.maximum(maximum, logits.max(axis=-1))
    weights = jnp.exp(logits - new_maximum[..., None])
    shrink = jnp.exp(maximum - new_maximum)
    update = jnp.einsum(
        "nhqs,nhsd->nhqd", weights.astype(v.dtype), v, precision=_PRECISION, preferred_element_type=jnp.float32
    )
    return Softmax(new_maximum, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + update)


def finish(softmax: Softmax) -> Float[Array, "N Hkv R D"]:
    """The attention; 0 for a row that saw nothing."""
    return softmax.out / jnp.where(softmax.total > 0, softmax.total, 1)[..., None]
