"""A step's work as query tiles: (candidate, first position, number of tokens).

A decode is a tile of one token; a prefill chunk is one or more tiles of `tile_q` tokens. Tiles without work are padding.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxpaged.engine.block_pool import exclusive_cumsum
from jaxpaged.engine.config import Bucket, EngineConfig
from jaxpaged.engine.schedule import Schedule


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """N tiles of `width` tokens, the used ones in front.

    candidate: index in the schedule; S for padding, which has no tokens. num_used: tiles that are not padding.
    """

    candidate: Int32[Array, " N"]
    first_position: Int32[Array, " N"]
    num_tokens: Int32[Array, " N"]
    num_used: Int32[Array, ""]
    width: int = field(metadata={"static": True})

    @property
    def num_tiles(self) -> int:
        return self.candidate.shape[0]

    @property
    def num_rows(self) -> int:
        return self.num_tiles * self.width

    def front(self, num_tiles: int) -> "Tiles":
        """The first `num_tiles` tiles."""
        return Tiles(
            self.candidate[:num_tiles],
            self.first_position[:num_tiles],
            self.num_tokens[:num_tiles],
            self.num_used,
            self.width,
        )


def decode_tiles(schedule: Schedule, num_tiles: int) -> Tiles:
    """The decodes in order, as `num_tiles` tiles of one token."""
    num_candidates = schedule.row.shape[0]
    place = jnp.where(schedule.decodes, jnp.cumsum(schedule.decodes) - 1, num_tiles)
    candidate = jnp.full(num_tiles, num_candidates, jnp.int32)
    candidate = candidate.at[place].set(jnp.arange(num_candidates, dtype=jnp.int32), mode="drop")
    position = schedule.cached.at[candidate].get(mode="fill", fill_value=0)
    used = candidate < num_candidates
    return Tiles(candidate, position, used.astype(jnp.int32), jnp.sum(used), width=1)


def prefill_tiles(schedule: Schedule, num_tiles: int, tile_q: int) -> Tiles:
    """The prefill chunks in order, cut in tiles of `tile_q` tokens; only a chunk's last tile may be part full."""
    count = (jnp.where(schedule.decodes, 0, schedule.scheduled) + tile_q - 1) // tile_q
    tile = jnp.arange(num_tiles)
    candidate = jnp.sum(tile[:, None] >= jnp.cumsum(count), axis=1, dtype=jnp.int32)

    def of_candidate(values: Int32[Array, " S"]) -> Int32[Array, " N"]:
        return values.at[candidate].get(mode="fill", fill_value=0)

    done = (tile - of_candidate(exclusive_cumsum(count))) * tile_q
    num_tokens = jnp.clip(of_candidate(schedule.scheduled) - done, 0, tile_q)
    return Tiles(candidate, of_candidate(schedule.cached) + done, num_tokens, jnp.sum(count), width=tile_q)


def cut_in_tiles(schedule: Schedule, config: EngineConfig) -> tuple[Tiles, Tiles]:
    """All decodes and all prefill chunks of a step, in the shape of the largest bucket."""
    largest = config.buckets[-1]
    return (
        decode_tiles(schedule, largest.decode_rows),
        prefill_tiles(schedule, largest.prefill_tiles, config.tile_q),
    )


def pick_bucket(decodes: Tiles, prefills: Tiles, buckets: tuple[Bucket, ...]) -> Int32[Array, ""]:
    """Index of the first, that is the smallest, bucket that the tiles fit in."""
    fits = [(decodes.num_used <= b.decode_rows) & (prefills.num_used <= b.prefill_tiles) for b in buckets]
    return jnp.argmax(jnp.stack(fits)).astype(jnp.int32)
