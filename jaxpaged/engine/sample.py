"""Choose the next token of each candidate that has consumed all its input."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.filters import asks_for_filter, filter_logits
from jaxpaged.engine.logits import Rows, adjust, needs_adjusting
from jaxpaged.engine.sampling import Sampling
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.state import RequestTable
from jaxpaged.engine.sums import cumsum, pick

Head = Callable[[Float[Array, "N hidden"]], Float[Array, "N V"]]


def samples(schedule: Schedule) -> Bool[Array, " S"]:
    """Which candidates produce a token in this step."""
    requests, scheduled = schedule.requests, schedule.scheduled
    return (scheduled > 0) & (requests.cached + scheduled == requests.total_len)


def sample(
    head: Head, hidden: Float[Array, "S hidden"], table: RequestTable, schedule: Schedule, config: EngineConfig
) -> Int32[Array, " S"]:
    """The next token of each candidate that samples; the others' entries have no meaning.

    The head, the widest matrix of a small model, runs on these rows alone, in the smallest bucket of rows.
    """
    sampled = samples(schedule)
    place = jnp.where(sampled, cumsum(sampled) - 1, -1)

    def sample_front(num_rows: int) -> Int32[Array, " S"]:
        at = place == jnp.arange(num_rows)[:, None]
        candidate, row = pick(at, jnp.arange(place.shape[0])), pick(at, schedule.row)
        logits = head(hidden.at[candidate].get(mode="promise_in_bounds", wrap_negative_indices=False))
        likeliest = _argmax(logits)
        # A batch in which nobody asks for more pays for no more.
        token = jax.lax.cond(
            jnp.any(sampled & schedule.requests.steered),
            lambda: next_token(logits, table, Rows.of(table, row, jnp.any(at, axis=1))),
            lambda: likeliest,
        )
        return pick(at.T, token)

    levels, num_rows = config.row_levels, jnp.sum(sampled)
    bucket = sum(((num_rows > level).astype(jnp.int32) for level in levels[:-1]), start=jnp.int32(0))
    return jax.lax.switch(bucket, [partial(sample_front, level) for level in levels])


def next_token(logits: Float[Array, "N V"], table: RequestTable, rows: Rows) -> Int32[Array, " N"]:
    """The token that each request's sampling parameters choose by its logits. What none asks for costs nothing."""
    adjusts, draws = needs_adjusting(rows), rows.sampling.draws
    logits = jax.lax.cond(jnp.any(adjusts), lambda: adjust(logits, table, rows), lambda: logits)
    greedy = _argmax(logits)
    drawn = jax.lax.cond(jnp.any(draws), lambda: draw(logits, rows.sampling, rows.output_position), lambda: greedy)
    return jnp.where(draws, drawn, greedy)


def draw(logits: Float[Array, "N V"], sampling: Sampling, output_position: Int32[Array, " N"]) -> Int32[Array, " N"]:
    """A token drawn from softmax(logits / temperature), filtered. Rows with a temperature of 0 draw with one of 1.

    Drawn with the Gumbel-max trick: argmax(logits / temperature + Gumbel noise). The noise depends on the row's seed
    and the position of its token in the output alone, so neighbours, slots and chunks never change what is drawn.
    """

    def noise(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    # Less the maximum, so that a tiny temperature overflows to -inf, which never wins, and not to +inf.
    temperature = jnp.where(sampling.draws, sampling.temperature, 1)[:, None]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    filters = jnp.any(asks_for_filter(sampling))
    kept = jax.lax.cond(filters, filter_logits, lambda logits, _: logits, scaled, sampling)
    return _argmax(kept + jax.vmap(noise)(sampling.seed, output_position))


def _argmax(x: Float[Array, "N V"]) -> Int32[Array, " N"]:
    """As jnp.argmax, which XLA compiles for CPU to one element at a time, seven times slower than these two passes.

    A row with a NaN gives 0, which is a token.
    """
    is_greatest = ~(x < x.max(axis=-1, keepdims=True))
    return jnp.min(jnp.where(is_greatest, jnp.arange(x.shape[-1]), x.shape[-1]), axis=-1)
