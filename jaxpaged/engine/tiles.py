"""A step's work, packed: the rows that the model computes, and the query tiles that attention computes.

The scheduled tokens stand one after another as *rows*, candidate by candidate, without padding between them.
Attention sees the same rows as *tiles* of tokens of one sequence: a decode is a tile of one token; a prefill chunk is
cut in tiles of `tile_q` tokens, of which only the last may be part full.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxpaged.engine.config import Bucket, EngineConfig
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.sums import cumsum, exclusive_cumsum


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """T rows, the used ones in front. candidate: index in the schedule; S for padding. position: in its sequence."""

    candidate: Int32[Array, " T"]
    position: Int32[Array, " T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """N tiles of `width` tokens, the used ones in front; padding has no tokens. first_row: where its rows begin."""

    candidate: Int32[Array, " N"]
    first_position: Int32[Array, " N"]
    num_tokens: Int32[Array, " N"]
    first_row: Int32[Array, " N"]
    width: int = field(metadata={"static": True})

    @property
    def num_tiles(self) -> int:
        return self.candidate.shape[0]

    @property
    def is_used(self) -> Bool[Array, "N Q"]:
        """Which places of the tiles hold a token."""
        return jnp.arange(self.width) < self.num_tokens[:, None]

    @property
    def rows(self) -> Int32[Array, "N Q"]:
        """The row of each place; where it holds no token, some row."""
        return self.first_row[:, None] + jnp.arange(self.width)


def pick_bucket(schedule: Schedule, config: EngineConfig) -> Int32[Array, ""]:
    """Index of the first, that is the smallest, bucket that the step fits in."""
    num_rows = jnp.sum(schedule.scheduled)
    prefills = num_rows > jnp.sum(schedule.decodes)
    first = jnp.int32(len(config.buckets) - 1)
    for i, bucket in reversed(list(enumerate(config.buckets[:-1]))):
        first = jnp.where((num_rows <= bucket.rows) & (~prefills | (bucket.prefill_tiles > 0)), i, first)
    return first


def pack_rows(schedule: Schedule, num_rows: int) -> Rows:
    row, end = jnp.arange(num_rows), cumsum(schedule.scheduled)
    candidate = jnp.sum(row[:, None] >= end, axis=1, dtype=jnp.int32)
    first_row, cached = _of(candidate, exclusive_cumsum(schedule.scheduled)), _of(candidate, schedule.requests.cached)
    used = candidate < schedule.row.shape[0]
    return Rows(candidate, jnp.where(used, cached + row - first_row, 0))


def cut_in_tiles(schedule: Schedule, bucket: Bucket, tile_q: int) -> list[Tiles]:
    """The decodes as tiles of one token, and, where the bucket has them, the prefill chunks as tiles of `tile_q`."""
    decodes = _tiles(schedule, jnp.where(schedule.decodes, schedule.scheduled, 0), bucket.decode_tiles, 1)
    if not bucket.prefill_tiles:
        return [decodes]
    prefills = _tiles(schedule, jnp.where(schedule.decodes, 0, schedule.scheduled), bucket.prefill_tiles, tile_q)
    return [decodes, prefills]


def _tiles(schedule: Schedule, num_tokens: Int32[Array, " S"], num_tiles: int, width: int) -> Tiles:
    """`num_tokens` of each candidate, cut in tiles of `width`."""
    count = (num_tokens + width - 1) // width
    tile = jnp.arange(num_tiles)
    candidate = jnp.sum(tile[:, None] >= cumsum(count), axis=1, dtype=jnp.int32)
    done = (tile - _of(candidate, exclusive_cumsum(count))) * width
    return Tiles(
        candidate,
        first_position=_of(candidate, schedule.requests.cached) + done,
        num_tokens=jnp.clip(_of(candidate, num_tokens) - done, 0, width),
        first_row=_of(candidate, exclusive_cumsum(schedule.scheduled)) + done,
        width=width,
    )


def _of(candidate: Int32[Array, " N"], values: Int32[Array, " S"]) -> Int32[Array, " N"]:
    """Each candidate's value; 0 for padding."""
    return values.at[candidate].get(mode="fill", fill_value=0)
