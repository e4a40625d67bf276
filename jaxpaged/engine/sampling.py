"""What requests ask of their next tokens, as the device holds it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """`SamplingParams` of requests, as columns.

    top_k: 0 is all. min_total_len: below it no stop id is generated. has_list: tokens are listed in the request's row.
    only_listed: none but those is generated.
    """

    temperature: Float32[Array, " *N"]
    seed: UInt32[Array, " *N"]
    top_k: Int32[Array, " *N"]
    top_p: Float32[Array, " *N"]
    min_p: Float32[Array, " *N"]
    repetition_penalty: Float32[Array, " *N"]
    presence_penalty: Float32[Array, " *N"]
    frequency_penalty: Float32[Array, " *N"]
    min_total_len: Int32[Array, " *N"]
    has_list: Bool[Array, " *N"]
    only_listed: Bool[Array, " *N"]

    @property
    def draws(self) -> Bool[Array, " *N"]:
        """Who does not take the likeliest token."""
        return self.temperature > 0

    @property
    def penalizes(self) -> Bool[Array, " *N"]:
        of_the_output = (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        return (self.repetition_penalty != 1) | of_the_output

    @property
    def steers(self) -> Bool[Array, " *N"]:
        """Who ever asks for other than the likeliest token."""
        return self.draws | self.penalizes | self.has_list | (self.min_total_len > 0)


def greedy() -> Sampling:
    """Of one request that asks for nothing but the likeliest token."""
    return Sampling(
        temperature=jnp.float32(0),
        seed=jnp.uint32(0),
        top_k=jnp.int32(0),
        top_p=jnp.float32(1),
        min_p=jnp.float32(0),
        repetition_penalty=jnp.float32(1),
        presence_penalty=jnp.float32(0),
        frequency_penalty=jnp.float32(0),
        min_total_len=jnp.int32(0),
        has_list=jnp.bool_(False),
        only_listed=jnp.bool_(False),
    )
