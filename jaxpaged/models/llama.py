"""The decoder: embed, then norm-attention and norm-MLP in every layer, then the final norm and the head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpaged.models import rope
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Attend, Attention, Embedding, GatedMLP, Linear, RMSNorm, Rotation, matmul


class DecoderLayer(nnx.Module):
    """One pre-norm layer with two residual branches."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden, eps=eps, dtype=dtype)
        self.attention = Attention(
            hidden, config.num_heads, config.num_kv_heads, config.head_dim, bias=config.attention_bias, dtype=dtype
        )
        self.mlp_norm = RMSNorm(hidden, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(hidden, config.intermediate_size, bias=config.mlp_bias, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T hidden"], rotation: Rotation, layer: int, attend: Attend
    ) -> Float[Array, "T hidden"]:
        attended = attend(layer, *self._before_attention(x, rotation))
        return self._after_attention(x, attended)

    # Layers of one shape are traced and lowered once.
    @jax.jit
    def _before_attention(self, x: Float[Array, "T hidden"], rotation: Rotation) -> tuple[Array, Array, Array]:
        return self.attention.project(self.attention_norm(x), rotation)

    @jax.jit
    def _after_attention(
        self, x: Float[Array, "T hidden"], attended: Float[Array, "T heads head_dim"]
    ) -> Float[Array, "T hidden"]:
        x = x + self.attention.combine(attended.astype(x.dtype))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """The Llama family. The rows of a call may belong to any sequences: only `attend` relates rows to one another.

    A new one holds zeros; `checkpoints.load` and `random_model` make filled ones. Parameters are float32 or bfloat16.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike) -> None:
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def __call__(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], attend: Attend
    ) -> Float[Array, "T hidden"]:
        """tokens i32 [T] at positions i32 [T] of their sequences -> hidden [T, hidden], final norm included.

        `attend(layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]` is called once per layer, in order.
        """
        config = self.config
        rotation = rope.rotation(positions, config.head_dim, config.rope_theta, config.rope_factors)
        rotation = jax.lax.optimization_barrier(rotation)  # or XLA computes it again in every layer
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, index, attend)
        return self.final_norm(x)

    def logits(self, hidden: Float[Array, "N hidden"]) -> Float[Array, "N vocab"]:
        """f32 logits of the rows `hidden`, accumulated in f32."""
        if self.head is None:
            return self.embedding.logits(hidden)
        return matmul(hidden, self.head.kernel[...]).astype(jnp.float32)
