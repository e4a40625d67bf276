"""Run the model over what a step has scheduled, in the shape of one bucket.

The work is a list of query tiles: (candidate, first position, number of tokens). A decode is a tile of one token; a prefill
chunk is one or more tiles of `tile_q` tokens. Tiles without a candidate are padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxpaged.engine.block_pool import exclusive_cumsum
from jaxpaged.engine.config import Bucket, EngineConfig
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.state import EngineState
from kernels_pallas.paged_attention import KVPool, paged_attention, write_kv


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """N query tiles of `width` tokens. candidate: index in the schedule; S for padding, which has no tokens."""

    candidate: Int32[Array, " N"]
    first_position: Int32[Array, " N"]
    num_tokens: Int32[Array, " N"]
    width: int = field(metadata={"static": True})

    @property
    def num_tiles(self) -> int:
        return self.candidate.shape[0]


def tiles_needed(schedule: Schedule, tile_q: int) -> tuple[Int32[Array, ""], Int32[Array, " S"]]:
    """Number of decode rows, and of prefill tiles of each candidate."""
    prefilled = jnp.where(schedule.decodes, 0, schedule.scheduled)
    return jnp.sum(schedule.decodes), (prefilled + tile_q - 1) // tile_q


def pick_bucket(schedule: Schedule, config: EngineConfig) -> Int32[Array, ""]:
    """Index of the smallest bucket that the step fits in."""
    num_decodes, num_tiles = tiles_needed(schedule, config.tile_q)
    fits = [
        (num_decodes <= bucket.decode_rows) & (jnp.sum(num_tiles) <= bucket.prefill_tiles) for bucket in config.buckets
    ]
    return jnp.argmax(jnp.stack(fits)).astype(jnp.int32)


def decode_tiles(schedule: Schedule, num_rows: int) -> Tiles:
    """The decodes, packed to the front of `num_rows` tiles of one token."""
    num_candidates = schedule.row.shape[0]
    place = jnp.where(schedule.decodes, jnp.cumsum(schedule.decodes) - 1, num_rows)
    candidate = jnp.full(num_rows, num_candidates, jnp.int32)
    candidate = candidate.at[place].set(jnp.arange(num_candidates, dtype=jnp.int32), mode="drop")
    position = schedule.cached.at[candidate].get(mode="fill", fill_value=0)
    return Tiles(candidate, position, (candidate < num_candidates).astype(jnp.int32), width=1)


def prefill_tiles(schedule: Schedule, num_tiles: int, tile_q: int) -> Tiles:
    """The prefill chunks, cut in tiles of `tile_q` tokens; only the last tile of a chunk may be part full."""
    _, count = tiles_needed(schedule, tile_q)
    tile = jnp.arange(num_tiles)
    candidate = jnp.searchsorted(jnp.cumsum(count), tile, side="right").astype(jnp.int32)

    def of_candidate(values: Int32[Array, " S"]) -> Int32[Array, " C"]:
        return values.at[candidate].get(mode="fill", fill_value=0)

    done = (tile - of_candidate(exclusive_cumsum(count))) * tile_q
    num_tokens = jnp.clip(of_candidate(schedule.scheduled) - done, 0, tile_q)
    return Tiles(candidate, of_candidate(schedule.cached) + done, num_tokens, width=tile_q)


@dataclass
class _PagedAttend:
    """The `attend` of one forward pass: writes keys and values to the pools, and attends over them, tiles by tiles."""

    kv: list[KVPool]
    groups: Sequence[Tiles]
    block_tables: Sequence[Int32[Array, "N M"]]
    block: Int32[Array, " T"]
    offset: Int32[Array, " T"]

    def __call__(
        self, layer: int, q: Float[Array, "T H D"], k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"]
    ) -> Float[Array, "T H D"]:
        self.kv[layer] = pool = write_kv(self.kv[layer], k, v, self.block, self.offset)
        out, first = [], 0
        for tiles, tables in zip(self.groups, self.block_tables, strict=True):
            rows = q[first : first + tiles.num_tiles * tiles.width]
            first += len(rows)
            rows = rows.reshape(tiles.num_tiles, tiles.width, *q.shape[1:])
            attended = paged_attention(
                rows, pool, tables, tiles.first_position, tiles.num_tokens, scale=q.shape[-1] ** -0.5
            )
            out.append(attended.reshape(-1, *q.shape[1:]))
        return jnp.concatenate(out)


def forward(
    model: nnx.Module, state: EngineState, schedule: Schedule, bucket: Bucket, config: EngineConfig
) -> tuple[Float[Array, "N V"], Int32[Array, " N"], tuple[KVPool, ...]]:
    """Consume the scheduled tokens.

    Returns the logits after the last token of each tile, the candidate that may sample from them (S: nobody, the tile
    is padding or its prompt goes on), and the pools with the new keys and values.
    """
    groups = [
        tiles
        for tiles in (
            decode_tiles(schedule, bucket.decode_rows),
            prefill_tiles(schedule, bucket.prefill_tiles, config.tile_q),
        )
        if tiles.num_tiles
    ]
    num_candidates = schedule.row.shape[0]
    inputs = [_inputs(state, schedule, tiles, config) for tiles in groups]
    tokens, positions, block, offset = (jnp.concatenate([part[i] for part in inputs]) for i in range(4))
    attend = _PagedAttend(list(state.kv), groups, [part[4] for part in inputs], block, offset)
    hidden = model(tokens, positions, attend)

    last_rows, samples, first = [], [], 0
    for tiles in groups:
        last_rows.append(first + jnp.arange(tiles.num_tiles) * tiles.width + jnp.maximum(tiles.num_tokens - 1, 0))
        total_len = schedule.total_len.at[tiles.candidate].get(mode="fill", fill_value=0)
        ends = (tiles.num_tokens > 0) & (tiles.first_position + tiles.num_tokens == total_len)
        samples.append(jnp.where(ends, tiles.candidate, num_candidates))
        first += tiles.num_tiles * tiles.width
    logits = model.logits(hidden[jnp.concatenate(last_rows)])
    return logits, jnp.concatenate(samples), tuple(attend.kv)


def _inputs(state: EngineState, schedule: Schedule, tiles: Tiles, config: EngineConfig) -> tuple[Array, ...]:
    """Flat tokens, positions, blocks and offsets of the tiles' rows, and the tiles' block tables."""
    requests, slots = state.requests, state.slots
    row = schedule.row.at[tiles.candidate].get(mode="fill", fill_value=0)
    slot = requests.slot[row]
    table = slots.block_table.at[slot].get(mode="fill", fill_value=config.scratch_block)
    valid = jnp.arange(tiles.width) < tiles.num_tokens[:, None]
    positions = jnp.where(valid, tiles.first_position[:, None] + jnp.arange(tiles.width), 0)
    tokens = jnp.where(valid, requests.tokens[row[:, None], positions], 0)
    block = jnp.take_along_axis(table, positions // config.block_size, axis=1)
    block = jnp.where(valid, block, config.scratch_block)
    return tokens.ravel(), positions.ravel(), block.ravel(), (positions % config.block_size).ravel(), table
