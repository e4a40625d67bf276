"""What sampling parameters do to logits, before a token is chosen by them. In the order of vLLM.

Each part is computed only where some request of the batch asks for it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxpaged.engine.columns import pack, unpack
from jaxpaged.engine.sampling import Sampling, greedy
from jaxpaged.engine.state import NO_TOKEN, RequestTable

_FORBIDDEN = -jnp.inf


class Rows(NamedTuple):
    """The requests whose tokens are chosen: their rows in the table, and what stands there. Lengths are in tokens.

    packed: the columns of `Sampling`, unpacked only where they are read.
    """

    row: Int32[Array, " N"]
    prompt_len: Int32[Array, " N"]
    total_len: Int32[Array, " N"]
    packed: Int32[Array, "N C2"]

    @classmethod
    def of(cls, table: RequestTable, row: Int32[Array, " N"], is_used: Bool[Array, " N"]) -> "Rows":
        """Of rows that exist. Those that nobody uses must not ask for what costs time: they ask for nothing."""
        requests = table[row]
        packed = table.sampling.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False)
        packed = jnp.where(is_used[:, None], packed, pack(greedy(), axis=-1))
        return cls(row, requests.prompt_len, requests.total_len, packed)

    @property
    def sampling(self) -> Sampling:
        return unpack(Sampling, self.packed, axis=-1)

    @property
    def output_position(self) -> Int32[Array, " N"]:
        """Of the token to come, from 0."""
        return self.total_len - self.prompt_len


def needs_adjusting(rows: Rows) -> Bool[Array, " N"]:
    return rows.sampling.has_list | _is_too_short(rows) | rows.sampling.penalizes


def adjust(logits: Float[Array, "N V"], table: RequestTable, rows: Rows) -> Float[Array, "N V"]:
    """Listed tokens, then `min_tokens`, then penalties."""
    for asks, part in (
        (rows.sampling.has_list, _apply_list),
        (_is_too_short(rows), _forbid_stop_ids),
        (rows.sampling.penalizes, _penalize),
    ):
        logits = jax.lax.cond(jnp.any(asks), part, lambda logits, *_: logits, logits, table, rows)
    return logits


def _is_too_short(rows: Rows) -> Bool[Array, " N"]:
    return rows.total_len < rows.sampling.min_total_len


def _apply_list(logits: Float[Array, "N V"], table: RequestTable, rows: Rows) -> Float[Array, "N V"]:
    listed = _places(table.listed_ids[rows.row], logits)
    bias = jnp.zeros_like(logits).at[listed].add(table.listed_bias[rows.row], mode="drop")
    is_listed = jnp.zeros(logits.shape, bool).at[listed].set(True, mode="drop")
    return jnp.where(is_listed | ~rows.sampling.only_listed[:, None], logits + bias, _FORBIDDEN)


def _forbid_stop_ids(logits: Float[Array, "N V"], table: RequestTable, rows: Rows) -> Float[Array, "N V"]:
    stop_ids = jnp.where(_is_too_short(rows)[:, None], table.stop_ids[rows.row], NO_TOKEN)
    return logits.at[_places(stop_ids, logits)].set(_FORBIDDEN, mode="drop")


def _penalize(logits: Float[Array, "N V"], table: RequestTable, rows: Rows) -> Float[Array, "N V"]:
    """Counts are of integers, so they are the same in whatever order a device adds them."""
    sampling, tokens = rows.sampling, table.tokens[rows.row]
    position = jnp.arange(tokens.shape[1])
    is_prompt = position < rows.prompt_len[:, None]
    is_output = ~is_prompt & (position < rows.total_len[:, None])
    in_prompt = jnp.zeros(logits.shape, bool)
    in_prompt = in_prompt.at[_places(jnp.where(is_prompt, tokens, NO_TOKEN), logits)].set(True, mode="drop")
    count = jnp.zeros(logits.shape, jnp.int32)
    count = count.at[_places(jnp.where(is_output, tokens, NO_TOKEN), logits)].add(1, mode="drop")

    repetition = sampling.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt | (count > 0), repeated, logits)
    logits -= sampling.frequency_penalty[:, None] * count
    return logits - sampling.presence_penalty[:, None] * (count > 0)


def _places(ids: Int32[Array, "N K"], logits: Float[Array, "N V"]) -> tuple[Array, Array]:
    """Where each row's ids stand in the logits. NO_TOKEN stands outside, and is dropped: -1 would be the last token."""
    return jnp.arange(ids.shape[0])[:, None], jnp.where(ids == NO_TOKEN, logits.shape[1], ids)
