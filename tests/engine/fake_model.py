"""A model without arithmetic: the next token hashes sequence and position, and tokens carry their sequence.

So a wrong token, position or row anywhere in the engine gives a wrong output.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.config import ModelConfig
from tests.oracle.fake import FakeForward

MAX_SEQUENCES = 32
TOKENS_OF_A_SEQUENCE = 32

MODEL_CONFIG = ModelConfig(
    family="llama",
    vocab_size=MAX_SEQUENCES * TOKENS_OF_A_SEQUENCE,
    hidden_size=2,
    intermediate_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=2**20,
    eos_token_ids=tuple(n * TOKENS_OF_A_SEQUENCE for n in range(MAX_SEQUENCES)),
)


def token_of(sequence: int, value: int) -> int:
    return sequence * TOKENS_OF_A_SEQUENCE + value


class FakeModel(nnx.Module):
    def __init__(self, forward: FakeForward) -> None:
        self.vocab_size = nnx.Param(jnp.uint32(forward.vocab_size))
        self.salt = nnx.Param(jnp.uint32(forward.salt))

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: object) -> jax.Array:
        return jnp.stack([tokens, positions], axis=1).astype(jnp.float32)

    def logits(self, hidden: jax.Array) -> jax.Array:
        sequence, position = hidden[:, 0].astype(jnp.int32) // TOKENS_OF_A_SEQUENCE, hidden[:, 1].astype(jnp.int32)
        value = FakeForward(self.vocab_size[...], self.salt[...]).on_device(sequence, position + 1)
        return jax.nn.one_hot(sequence * TOKENS_OF_A_SEQUENCE + value, MODEL_CONFIG.vocab_size)
