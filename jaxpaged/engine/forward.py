"""Run the model over what a step has scheduled, in the smallest bucket that it fits in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.state import EngineState
from jaxpaged.engine.tiles import Tiles, cut_in_tiles, pick_bucket
from kernels_pallas.paged_attention import KVPool, paged_attention, write_kv

Attend = Callable[[int, Array, Array, Array], Array]
Model = Callable[[Int32[Array, " T"], Int32[Array, " T"], Attend], Float[Array, "T hidden"]]


def forward(
    model: Model, state: EngineState, schedule: Schedule, config: EngineConfig
) -> tuple[EngineState, Float[Array, "S hidden"]]:
    """Consume the scheduled tokens. Returns the state with their keys and values, and each candidate's last hidden row."""
    decodes, prefills = cut_in_tiles(schedule, config)
    branches = [
        partial(
            _forward_tiles,
            model,
            [tiles for tiles in (decodes.front(b.decode_rows), prefills.front(b.prefill_tiles)) if tiles.num_tiles],
            config,
        )
        for b in config.buckets
    ]
    kv, hidden = jax.lax.switch(pick_bucket(decodes, prefills, config.buckets), branches, state, schedule)
    return replace(state, kv=kv), hidden


def _forward_tiles(
    model: Model, groups: Sequence[Tiles], config: EngineConfig, state: EngineState, schedule: Schedule
) -> tuple[tuple[KVPool, ...], Float[Array, "S hidden"]]:
    inputs = [_inputs(tiles, state, schedule, config) for tiles in groups]
    tokens, positions, block, offset = (jnp.concatenate([part[i] for part in inputs]) for i in range(4))
    attend = _PagedAttend(list(state.kv), groups, [part[4] for part in inputs], block, offset)
    hidden = model(tokens, positions, attend)

    num_candidates, first = schedule.row.shape[0], 0
    last = jnp.zeros((num_candidates, hidden.shape[-1]), hidden.dtype)
    for tiles in groups:
        rows = first + jnp.arange(tiles.num_tiles) * tiles.width + jnp.maximum(tiles.num_tokens - 1, 0)
        scheduled_end = (schedule.cached + schedule.scheduled).at[tiles.candidate].get(mode="fill", fill_value=0)
        is_last = tiles.first_position + tiles.num_tokens == scheduled_end
        last = last.at[jnp.where(is_last, tiles.candidate, num_candidates)].set(hidden[rows], mode="drop")
        first += tiles.num_rows
    return tuple(attend.kv), last


@dataclass
class _PagedAttend:
    """The `attend` of one forward pass: writes keys and values to the pools, and attends over them, group by group."""

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
            rows = q[first : first + tiles.num_rows].reshape(tiles.num_tiles, tiles.width, *q.shape[1:])
            first += tiles.num_rows
            attended = paged_attention(
                rows, pool, tables, tiles.first_position, tiles.num_tokens, scale=q.shape[-1] ** -0.5
            )
            out.append(attended.reshape(-1, *q.shape[1:]))
        return jnp.concatenate(out)


def _inputs(tiles: Tiles, state: EngineState, schedule: Schedule, config: EngineConfig) -> tuple[Array, ...]:
    """Flat tokens, positions, blocks and offsets of the tiles' rows, and the tiles' block tables."""
    requests, slots = state.requests, state.slots
    row = schedule.row.at[tiles.candidate].get(mode="fill", fill_value=0)
    table = slots.block_table.at[requests.slot[row]].get(mode="fill", fill_value=config.scratch_block)
    valid = jnp.arange(tiles.width) < tiles.num_tokens[:, None]
    positions = jnp.where(valid, tiles.first_position[:, None] + jnp.arange(tiles.width), 0)
    tokens = jnp.where(valid, requests.tokens[row[:, None], positions], 0)
    block = jnp.take_along_axis(table, positions // config.block_size, axis=1)
    block = jnp.where(valid, block, config.scratch_block)
    return tokens.ravel(), positions.ravel(), block.ravel(), (positions % config.block_size).ravel(), table
