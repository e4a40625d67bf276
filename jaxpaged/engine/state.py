"""The nouns: everything the engine knows, as one pytree.

Axes: R rows of the request table, S slots, M blocks of a table, L = max_model_len, K stop ids, N blocks of the pool.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

from jaxpaged.engine.block_pool import BlockPool, init_block_pool
from jaxpaged.engine.config import EngineConfig
from kernels_pallas.paged_attention import KVPool, init_kv_pool

EMPTY, WAITING, RUNNING = 0, 1, 2
NO_TOKEN = -1  # fills unused stop ids; no sampled token equals it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """The request table: one row for each request that is waiting or running. Lengths are in tokens.

    status: EMPTY, WAITING or RUNNING. seq: the request's ID, which is also its place in the queue's order.
    cached: tokens consumed as input. prefill_len: total_len at admission; below it the sequence prefills.
    max_total_len: total_len at which it finishes. slot: its slot; S, the number of slots, while it has none.
    """

    seq: Int32[Array, " R"]
    status: Int32[Array, " R"]
    slot: Int32[Array, " R"]
    tokens: Int32[Array, "R L"]
    prompt_len: Int32[Array, " R"]
    total_len: Int32[Array, " R"]
    cached: Int32[Array, " R"]
    prefill_len: Int32[Array, " R"]
    max_total_len: Int32[Array, " R"]
    stop_ids: Int32[Array, "R K"]
    temperature: Float[Array, " R"]
    seed: UInt32[Array, " R"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What a running sequence holds: its blocks, in order of position. A slot with no block is free."""

    block_table: Int32[Array, "S M"]
    num_blocks: Int32[Array, " S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    requests: Requests
    slots: Slots
    block_pool: BlockPool
    kv: tuple[KVPool, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewRequests:
    """Requests on their way into the table: A of them, each with the row it goes to (R: no request)."""

    row: Int32[Array, " A"]
    seq: Int32[Array, " A"]
    tokens: Int32[Array, "A L"]
    prompt_len: Int32[Array, " A"]
    max_total_len: Int32[Array, " A"]
    stop_ids: Int32[Array, "A K"]
    temperature: Float[Array, " A"]
    seed: UInt32[Array, " A"]


def init_scheduler(config: EngineConfig) -> tuple[Requests, Slots, BlockPool]:
    """An empty table, free slots and a fresh pool."""
    rows, slots = config.num_rows, config.max_num_seqs

    def zeros(*shape: int) -> Int[Array, "..."]:
        return jnp.zeros(shape, jnp.int32)

    requests = Requests(
        seq=zeros(rows),
        status=jnp.full(rows, EMPTY, jnp.int32),
        slot=jnp.full(rows, slots, jnp.int32),
        tokens=zeros(rows, config.max_model_len),
        prompt_len=zeros(rows),
        total_len=zeros(rows),
        cached=zeros(rows),
        prefill_len=zeros(rows),
        max_total_len=zeros(rows),
        stop_ids=jnp.full((rows, config.max_stop_ids), NO_TOKEN, jnp.int32),
        temperature=jnp.zeros(rows, jnp.float32),
        seed=jnp.zeros(rows, jnp.uint32),
    )
    block_table = jnp.full((slots, config.max_blocks), config.scratch_block, jnp.int32)
    return requests, Slots(block_table, zeros(slots)), init_block_pool(config.num_blocks)


def init_state(
    config: EngineConfig,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: np.typing.DTypeLike,
    implementation: str | None = None,
) -> EngineState:
    """A fresh engine: nothing waits, nothing runs, and each of `num_layers` layers has its pool."""
    requests, slots, block_pool = init_scheduler(config)
    kv = tuple(
        init_kv_pool(config.num_blocks, config.block_size, num_kv_heads, head_dim, jnp.dtype(dtype), implementation)
        for _ in range(num_layers)
    )
    return EngineState(requests, slots, block_pool, kv)


def enqueue(requests: Requests, new: NewRequests, no_slot: int) -> Requests:
    """Put `new` in their rows, where they wait. Entries whose row is R are dropped."""

    def put(column: Array, values: Array | int) -> Array:
        return column.at[new.row].set(values, mode="drop")

    return Requests(
        seq=put(requests.seq, new.seq),
        status=put(requests.status, WAITING),
        slot=put(requests.slot, no_slot),
        tokens=put(requests.tokens, new.tokens),
        prompt_len=put(requests.prompt_len, new.prompt_len),
        total_len=put(requests.total_len, new.prompt_len),
        cached=put(requests.cached, 0),
        prefill_len=put(requests.prefill_len, 0),
        max_total_len=put(requests.max_total_len, new.max_total_len),
        stop_ids=put(requests.stop_ids, new.stop_ids),
        temperature=put(requests.temperature, new.temperature),
        seed=put(requests.seed, new.seed),
    )
