"""The nouns: everything the engine knows, as one pytree.

Axes: R rows of the request table, S slots, M blocks of a table, L = max_model_len, K stop ids, T listed tokens, N
blocks of the pool.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jaxpaged.engine.block_pool import BlockPool, init_block_pool
from jaxpaged.engine.columns import num_columns, pack, unpack
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.prefix_cache import PrefixCache, init_prefix_cache
from jaxpaged.engine.sampling import Sampling, greedy
from kernels_pallas.paged_attention import KVPool, init_kv_pool

EMPTY, WAITING, RUNNING = 0, 1, 2  # the running ones stand first in the queue's order, the empty rows last
NO_TOKEN = -1  # fills unused stop ids; no sampled token equals it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """Requests that wait or run, as columns. Lengths are in tokens.

    status: EMPTY, WAITING or RUNNING. seq: the request's ID, which is also its place in the queue's order.
    slot: S, the number of slots, while it has none. num_blocks: those in its slot's block table.
    cached: tokens consumed as input. prefill_len: total_len at admission; below it the sequence prefills.
    max_total_len: total_len at which it finishes. steered: whether its `Sampling` asks for more than the likeliest
    token. cache_salt: sequences share blocks only if it is the same.
    """

    seq: Int32[Array, " *N"]
    status: Int32[Array, " *N"]
    slot: Int32[Array, " *N"]
    num_blocks: Int32[Array, " *N"]
    prompt_len: Int32[Array, " *N"]
    total_len: Int32[Array, " *N"]
    cached: Int32[Array, " *N"]
    prefill_len: Int32[Array, " *N"]
    max_total_len: Int32[Array, " *N"]
    steered: Bool[Array, " *N"]
    cache_salt: Int32[Array, " *N"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RequestTable:
    """One row for each request that is waiting or running.

    rows, sampling: the columns of `Requests` and of `Sampling`, packed; the latter never change. listed_ids,
    listed_bias: tokens whose logits change by themselves, and what is added to them.
    """

    rows: Int32[Array, "R C"]
    tokens: Int32[Array, "R L"]
    stop_ids: Int32[Array, "R K"]
    sampling: Int32[Array, "R C2"]
    listed_ids: Int32[Array, "R T"]
    listed_bias: Float32[Array, "R T"]

    @property
    def columns(self) -> Requests:
        """Of all rows."""
        return unpack(Requests, self.rows, axis=-1)

    def __getitem__(self, row: Int32[Array, " *N"]) -> Requests:
        """The requests in these rows, all of which exist."""
        return unpack(Requests, self.rows.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False), axis=-1)

    def write(self, row: Int32[Array, " N"], requests: Requests) -> "RequestTable":
        """With `requests` in these rows, of which each is another. A row R is dropped."""
        packed = pack(requests, axis=-1)
        return replace(self, rows=self.rows.at[row].set(packed, mode="drop"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """block_tables: of each slot, the blocks of the sequence that holds it, in order of position.

    prefix_cache: None where it is off.
    """

    requests: RequestTable
    block_tables: Int32[Array, "S M"]
    block_pool: BlockPool
    prefix_cache: PrefixCache | None
    kv: tuple[KVPool, ...]

    def tables_of(self, requests: Requests, config: EngineConfig) -> Int32[Array, "S M"]:
        """The block table of each request; the scratch block for one without a slot."""
        return self.block_tables.at[requests.slot].get(mode="fill", fill_value=config.scratch_block)


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
    cache_salt: Int32[Array, " A"]
    sampling: Sampling
    listed_ids: Int32[Array, "A T"]
    listed_bias: Float32[Array, "A T"]


def init_scheduler(
    config: EngineConfig,
) -> tuple[RequestTable, Int32[Array, "S M"], BlockPool, PrefixCache | None]:
    """An empty table, block tables without blocks, a fresh pool, and a prefix cache that holds nothing."""
    rows, slots = config.num_rows, config.max_num_seqs
    nobody = unpack(Requests, jnp.full((rows, num_columns(Requests)), EMPTY, jnp.int32), axis=-1)
    table = RequestTable(
        rows=pack(replace(nobody, slot=jnp.full(rows, slots, jnp.int32)), axis=-1),
        tokens=jnp.zeros((rows, config.max_model_len), jnp.int32),
        stop_ids=jnp.full((rows, config.max_stop_ids), NO_TOKEN, jnp.int32),
        sampling=jnp.tile(pack(greedy(), axis=-1), (rows, 1)),
        listed_ids=jnp.full((rows, config.max_listed_tokens), NO_TOKEN, jnp.int32),
        listed_bias=jnp.zeros((rows, config.max_listed_tokens), jnp.float32),
    )
    block_tables = jnp.full((slots, config.max_blocks), config.scratch_block, jnp.int32)
    prefix_cache = init_prefix_cache(config) if config.enable_prefix_caching else None
    return table, block_tables, init_block_pool(config.num_blocks), prefix_cache


def init_state(
    config: EngineConfig,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: np.typing.DTypeLike,
    implementation: str | None = None,
) -> EngineState:
    """A fresh engine: nothing waits, nothing runs, and each of `num_layers` layers has its pool."""
    scheduler = init_scheduler(config)
    kv = tuple(
        init_kv_pool(config.num_blocks, config.block_size, num_kv_heads, head_dim, jnp.dtype(dtype), implementation)
        for _ in range(num_layers)
    )
    return EngineState(*scheduler, kv)


def enqueue(table: RequestTable, new: NewRequests, no_slot: int) -> RequestTable:
    """Put `new` in their rows, where they wait. Entries whose row is R are dropped."""
    none = jnp.zeros_like(new.seq)
    requests = Requests(
        seq=new.seq,
        status=none + WAITING,
        slot=none + no_slot,
        num_blocks=none,
        prompt_len=new.prompt_len,
        total_len=new.prompt_len,
        cached=none,
        prefill_len=none,
        max_total_len=new.max_total_len,
        steered=new.sampling.steers,
        cache_salt=new.cache_salt,
    )

    def entered(column: Array, values: Array) -> Array:
        return column.at[new.row].set(values, mode="drop")

    return replace(
        table.write(new.row, requests),
        tokens=entered(table.tokens, new.tokens),
        stop_ids=entered(table.stop_ids, new.stop_ids),
        sampling=entered(table.sampling, pack(new.sampling, axis=-1)),
        listed_ids=entered(table.listed_ids, new.listed_ids),
        listed_bias=entered(table.listed_bias, new.listed_bias),
    )
