"""Run the model over what a step has scheduled, in the smallest bucket that it fits in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxpaged.engine.config import Bucket, EngineConfig
from jaxpaged.engine.schedule import Schedule
from jaxpaged.engine.state import EngineState
from jaxpaged.engine.sums import cumsum
from jaxpaged.engine.tiles import Tiles, cut_in_tiles, pack_rows, pick_bucket
from kernels_pallas.paged_attention import KVPool, paged_attention, write_kv

Attend = Callable[[int, Array, Array, Array], Array]
Model = Callable[[Int32[Array, " T"], Int32[Array, " T"], Attend], Float[Array, "T hidden"]]


def forward(
    model: Model, state: EngineState, schedule: Schedule, config: EngineConfig
) -> tuple[EngineState, Float[Array, "S hidden"]]:
    """Consume the scheduled tokens. Returns the state with their keys and values, and each candidate's last row."""
    branches = [partial(_forward_bucket, model, bucket, config) for bucket in config.buckets]
    kv, hidden = jax.lax.switch(pick_bucket(schedule, config), branches, state, schedule)
    return replace(state, kv=kv), hidden


def _forward_bucket(
    model: Model, bucket: Bucket, config: EngineConfig, state: EngineState, schedule: Schedule
) -> tuple[tuple[KVPool, ...], Float[Array, "S hidden"]]:
    rows = pack_rows(schedule, bucket.rows)
    used = rows.candidate < schedule.row.shape[0]
    request = schedule.row.at[rows.candidate].get(mode="fill", fill_value=0)
    tokens = jnp.where(used, state.requests.tokens[request, rows.position], 0)

    tables = state.tables_of(schedule.requests, config)
    block = tables.at[rows.candidate, rows.position // config.block_size].get(
        mode="fill", fill_value=config.scratch_block
    )
    attend = _PagedAttend(
        list(state.kv), cut_in_tiles(schedule, bucket, config.tile_q), tables, block, rows.position % config.block_size
    )
    hidden = model(tokens, rows.position, attend)
    last_row = cumsum(schedule.scheduled) - 1
    return tuple(attend.kv), hidden.at[last_row].get(mode="clip")


@dataclass
class _PagedAttend:
    """The `attend` of one forward pass: writes keys and values to the pools, and attends over them.

    block_tables: of the candidates. block, offset: where each row's key and value go.
    """

    kv: list[KVPool]
    groups: Sequence[Tiles]
    block_tables: Int32[Array, "S M"]
    block: Int32[Array, " T"]
    offset: Int32[Array, " T"]

    def __call__(
        self, layer: int, q: Float[Array, "T H D"], k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"]
    ) -> Float[Array, "T H D"]:
        self.kv[layer], out = _write_and_attend(
            self.kv[layer], q, k, v, self.groups, self.block_tables, self.block, self.offset
        )
        return out


@jax.jit  # traced once for all layers of a bucket
def _write_and_attend(
    pool: KVPool,
    q: Float[Array, "T H D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    groups: Sequence[Tiles],
    block_tables: Int32[Array, "S M"],
    block: Int32[Array, " T"],
    offset: Int32[Array, " T"],
) -> tuple[KVPool, Float[Array, "T H D"]]:
    """One layer's keys and values into its pool, then its attention, tiles by tiles."""
    pool = write_kv(pool, k, v, block, offset)
    out = jnp.zeros_like(q)
    for tiles in groups:
        attended = paged_attention(
            q.at[tiles.rows].get(mode="clip"),
            pool,
            block_tables.at[tiles.candidate].get(mode="clip"),
            tiles.first_position,
            tiles.num_tokens,
            scale=q.shape[-1] ** -0.5,
        )
        out = out.at[jnp.where(tiles.is_used, tiles.rows, len(q))].set(attended, mode="drop")
    return pool, out
