"""Plain causal attention over one whole sequence: with it a model is an ordinary Flax model, without a cache."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.models.layers import Attend


def causal_attend(positions: Int[Array, " T"]) -> Attend:
    """An `attend` for rows of one sequence at `positions`: a row sees the rows at its own and lower positions.

    A row at a negative position is padding: nobody sees it, and its own result is 0. What a row does not see
    cannot change it, be it NaN. Scores and sums are f32; the result has the dtype of q.
    """
    visible = (positions[None, :] <= positions[:, None]) & (positions >= 0)[None, :]

    def attend(
        layer: int,
        q: Float[Array, "T heads head_dim"],
        k: Float[Array, "T kv_heads head_dim"],
        v: Float[Array, "T kv_heads head_dim"],
    ) -> Float[Array, "T heads head_dim"]:
        del layer  # there is no cache to choose from
        rows, kv_heads, head_dim = k.shape
        grouped = q.astype(jnp.float32).reshape(rows, kv_heads, -1, head_dim)
        scores = jnp.einsum("tkgd,skd->kgts", grouped, k.astype(jnp.float32), precision="highest") / math.sqrt(head_dim)
        weights = jax.nn.softmax(scores, axis=-1, where=visible)
        # 0 * NaN is NaN: values that are not finite stay out of the product and reach only the rows that see them.
        finite = jnp.isfinite(v)
        out = jnp.einsum("kgts,skd->tkgd", weights, jnp.where(finite, v, 0).astype(jnp.float32), precision="highest")
        spoiled = jnp.einsum("ts,skd->tkd", visible.astype(jnp.float32), (~finite).astype(jnp.float32)) > 0
        return jnp.where(spoiled[:, :, None, :], jnp.nan, out).reshape(q.shape).astype(q.dtype)

    return attend
