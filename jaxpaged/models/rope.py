"""Rotary position embeddings. Angles are computed in f32 from the positions, so no table bounds the length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpaged.models.fields import Fields

HF_TYPES = ("default", "linear", "llama3")
GGUF_TYPES = ("none", "linear")


def rotation(
    positions: Int[Array, " T"], head_dim: int, theta: float, factors: tuple[float, ...] | None
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """(cos, sin) f32 of the angle of each position and each of the head_dim / 2 frequencies."""
    frequencies = _frequencies(head_dim, theta) / (1.0 if factors is None else np.asarray(factors))
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "T heads head_dim"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads head_dim"]:
    """Rotate the pairs (i, i + head_dim / 2) of each head, in f32; the result has the dtype of `x`."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def factors_from_hf(parameters: Mapping[str, Any], head_dim: int, theta: float) -> tuple[float, ...] | None:
    """What each frequency is divided by under the options in config.json. Raises ValueError for an unknown type."""
    get = Fields(parameters)
    # Configurations older than the key "rope_type" call it "type".
    kind = get.choice("rope_type", HF_TYPES, get.choice("type", HF_TYPES, "default"))
    if kind == "default":
        return None
    factor = get.positive("factor")
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    low, high = get.positive("low_freq_factor"), get.positive("high_freq_factor")
    if not low < high:
        raise ValueError(f"rope low_freq_factor={low} is not below high_freq_factor={high}")
    # Turns that each frequency makes over the original context: many are kept, few are slowed by `factor`.
    turns = get.positive("original_max_position_embeddings") * _frequencies(head_dim, theta) / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return tuple((1.0 / (keep + (1.0 - keep) / factor)).tolist())


def factors_from_gguf(fields: Fields, head_dim: int) -> tuple[float, ...] | None:
    """The same from a GGUF's metadata, where llama3 scaling stands in a tensor instead (`rope_freqs.weight`)."""
    kind = fields.choice("rope.scaling.type", GGUF_TYPES, "none")
    return None if kind == "none" else (fields.positive("rope.scaling.factor"),) * (head_dim // 2)


def _frequencies(head_dim: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
