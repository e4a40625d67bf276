"""A forward without a model: the next token is a hash of who asks for it, the same in Python and in jnp."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class FakeForward:
    """Tokens in `[0, vocab_size)`, uniform; a request with k stop ids stops with probability k / vocab_size a token."""

    vocab_size: int
    salt: int = 0

    def __call__(self, seq: int, position: int) -> int:
        """The token at index `position` of sequence `seq`, that is, the one after `position` tokens."""
        word = (seq * 0x9E3779B1 + position * 0x85EBCA77 + self.salt) & 0xFFFFFFFF
        word ^= word >> 16
        word = (word * 0x7FEB352D) & 0xFFFFFFFF
        word ^= word >> 15
        word = (word * 0x846CA68B) & 0xFFFFFFFF
        word ^= word >> 16
        return word % self.vocab_size

    def on_device(self, seq: jax.Array, position: jax.Array) -> jax.Array:
        """The same for arrays of one shape, integers from 0; returns int32. The salt may be traced."""
        word = seq.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + position.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
        word = word + jnp.asarray(self.salt, jnp.uint32)
        word ^= word >> 16
        word = word * jnp.uint32(0x7FEB352D)
        word ^= word >> 15
        word = word * jnp.uint32(0x846CA68B)
        word ^= word >> 16
        return (word % jnp.uint32(self.vocab_size)).astype(jnp.int32)
