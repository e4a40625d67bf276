"""Choose the next token of each candidate that has consumed all its input."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.sums import cumsum, pick

Head = Callable[[Float[Array, "N hidden"]], Float[Array, "N V"]]


def samples(schedule: Schedule) -> Bool[Array, " S"]:
    """Which candidates produce a token in this step."""
    requests, scheduled = schedule.requests, schedule.scheduled
    return (scheduled > 0) & (requests.cached + scheduled == requests.total_len)


def sample(
    head: Head, hidden: Float[Array, "S hidden"], schedule: Schedule, config: EngineConfig
) -> Int32[Array, " S"]:
    """The next token of each candidate that samples; the others' entries have no meaning.

    The head, the widest matrix of a small model, runs on these rows alone, in the smallest bucket of rows.
    """
    requests, sampled = schedule.requests, samples(schedule)
    place = jnp.where(sampled, cumsum(sampled) - 1, -1)

    def sample_front(num_rows: int) -> Int32[Array, " S"]:
        at = place == jnp.arange(num_rows)[:, None]
        front = jax.tree.map(partial(pick, at), requests)
        candidate = pick(at, jnp.arange(place.shape[0]))
        token = next_token(
            head(hidden.at[candidate].get(mode="promise_in_bounds", wrap_negative_indices=False)),
            front.temperature_bits.view(jnp.float32),
            front.seed_bits,
            front.total_len - front.prompt_len,
        )
        return pick(at.T, token)

    levels, num_rows = config.row_levels, jnp.sum(sampled)
    bucket = sum(((num_rows > level).astype(jnp.int32) for level in levels[:-1]), start=jnp.int32(0))
    return jax.lax.switch(bucket, [partial(sample_front, level) for level in levels])


def next_token(
    logits: Float[Array, "N V"],
    temperature: Float[Array, " N"],
    seed: UInt32[Array, " N"] | Int32[Array, " N"],
    output_position: Int32[Array, " N"],
) -> Int32[Array, " N"]:
    """The most likely token where the temperature is 0, else one drawn from softmax(logits / temperature).

    Drawn with the Gumbel-max trick: argmax(logits / temperature + Gumbel noise). The noise depends on the row's seed
    and the position of its token in the output alone, so neighbours, slots and chunks never change what is drawn.
    """
    greedy = _argmax(logits)

    def draw() -> Int32[Array, " N"]:
        def noise(seed: Array, position: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

        hot = temperature > 0
        # Less the maximum, so that a tiny temperature overflows to -inf, which never wins, and not to +inf.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(hot, temperature, 1)[:, None]
        drawn = _argmax(scaled + jax.vmap(noise)(seed, output_position))
        return jnp.where(hot, drawn, greedy)

    # A batch without a temperature does not pay for noise.
    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _argmax(x: Float[Array, "N V"]) -> Int32[Array, " N"]:
    """As jnp.argmax, which XLA compiles for CPU to one element at a time, seven times slower than these two passes.

    A row with a NaN gives 0, which is a token.
    """
    is_greatest = ~(x < x.max(axis=-1, keepdims=True))
    return jnp.min(jnp.where(is_greatest, jnp.arange(x.shape[-1]), x.shape[-1]), axis=-1)
