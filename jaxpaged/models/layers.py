"""Layers that the model families share; what differs between families is an option here, not another layer.

Weights are stored for the product that runs, `x @ kernel` with kernel [in, out]. Products of f32 are f32 on every
device (some round the inputs by default), and products of bf16 accumulate in f32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpaged.models import rope

Attend = Callable[
    [int, Float[Array, "T heads head_dim"], Float[Array, "T kv_heads head_dim"], Float[Array, "T kv_heads head_dim"]],
    Float[Array, "T heads head_dim"],
]
"""attend(layer, q, k, v) -> attention of each row over the keys and values it may see. It scales the scores by
1 / sqrt(head_dim); q and k come with their positions rotated in."""

Rotation = tuple[Float[Array, "T half"], Float[Array, "T half"]]


def matmul(x: Float[Array, "rows inner"], kernel: Float[Array, "inner outer"]) -> Float[Array, "rows outer"]:
    """x @ kernel, accumulated and returned in f32."""
    return jnp.dot(x, kernel, precision=_precision(x.dtype), preferred_element_type=jnp.float32)


def _precision(dtype: DTypeLike) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


class Linear(nnx.Module):
    """x @ kernel (+ bias); the result has the dtype of x."""

    def __init__(self, inner: int, outer: int, *, bias: bool, dtype: DTypeLike) -> None:
        self.kernel = nnx.Param(jnp.zeros((inner, outer), dtype))
        self.bias = nnx.Param(jnp.zeros((outer,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "T inner"]) -> Float[Array, "T outer"]:
        return self.in_float32(x).astype(x.dtype)

    def in_float32(self, x: Float[Array, "T inner"]) -> Float[Array, "T outer"]:
        """The result as it was accumulated, for more to be computed with it before it is rounded."""
        y = matmul(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


class Embedding(nnx.Module):
    """A row per token; also the output head where the two are tied."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike) -> None:
        self.table = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T hidden"]:
        return self.table[...][tokens]

    def logits(self, hidden: Float[Array, "N hidden"]) -> Float[Array, "N vocab"]:
        """hidden @ table.T in f32, without a transposed copy (at this width as fast as one, and half the memory)."""
        table = self.table[...]
        contract_hidden = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(
            hidden, table, contract_hidden, precision=_precision(hidden.dtype), preferred_element_type=jnp.float32
        )


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in f32; the result has the dtype of x."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Projections and rotary positions, before and after an `attend` that owns the keys and values."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool, dtype: DTypeLike
    ) -> None:
        self.head_dim = head_dim
        self.query = Linear(hidden_size, num_heads * head_dim, bias=bias, dtype=dtype)
        self.key = Linear(hidden_size, num_kv_heads * head_dim, bias=bias, dtype=dtype)
        self.value = Linear(hidden_size, num_kv_heads * head_dim, bias=bias, dtype=dtype)
        self.output = Linear(num_heads * head_dim, hidden_size, bias=bias, dtype=dtype)

    def project(self, x: Float[Array, "T hidden"], rotation: Rotation) -> tuple[Array, Array, Array]:
        """The queries, keys and values of each row, positions rotated in: [T, H, D], [T, Hkv, D], [T, Hkv, D]."""
        q, k, v = (project(x).reshape(len(x), -1, self.head_dim) for project in (self.query, self.key, self.value))
        return rope.rotate(q, *rotation), rope.rotate(k, *rotation), v

    def combine(self, attended: Float[Array, "T heads head_dim"]) -> Float[Array, "T hidden"]:
        return self.output(attended.reshape(len(attended), -1))


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), rounded to the dtype of x between the products alone."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, dtype: DTypeLike) -> None:
        self.gate = Linear(hidden_size, intermediate_size, bias=bias, dtype=dtype)
        self.up = Linear(hidden_size, intermediate_size, bias=bias, dtype=dtype)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype)

    def __call__(self, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
        gated = jax.nn.silu(self.gate.in_float32(x)) * self.up.in_float32(x)
        return self.down(gated.astype(x.dtype))
