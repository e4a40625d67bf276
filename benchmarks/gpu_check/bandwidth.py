"""Part 2: how fast decode attention reads keys and values, and how long a write of new ones takes.

The measure is bytes that must be moved / time / what a large copy on the same device moves in that time, read and
written bytes counted. Many iterations run in one program, each with the last one's result as its queries, so no launch
from Python counts and none can be left out; they take turns with block tables that share no block, so that together
they read several times what a cache holds. All data is random.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.gpu_check.kv_write import measure_writes
from benchmarks.gpu_check.measure import copy_bandwidth, free_bytes, random_pool, seconds_of, summary
from benchmarks.gpu_check.part import Part, one_line
from kernels_pallas.paged_attention import KVPool, init_kv_pool, paged_attention
from kernels_pallas.paged_attention.shapes import SHAPES, Shape

DTYPE = jnp.bfloat16
GOALS = {(64, 4096): 0.80, (1, 32768): 0.70}  # (batch, context): share of the copy's bandwidth
_CACHE_BYTES = 128 << 20  # the largest second-level cache of today's chips (B200: 126 MB); an H200 has 50
_MOST_WORKERS = 8


@dataclass(frozen=True)
class Sizes:
    """pool_bytes: of one layer's keys and values. Longer batches read its blocks several times, far apart: a serving
    engine's pool of one layer is hardly ever larger. seconds: that one measured call shall take."""

    shapes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    write_rows: tuple[int, ...]
    pool_bytes: int
    copy_bytes: int
    copies: int
    writes: int
    seconds: float
    calls: int
    most_turns: int


FULL = Sizes(
    shapes=("qwen3-0.6b", "llama-3.1-8b"),
    block_sizes=(16, 256),
    batches=(1, 8, 64, 256),
    contexts=(512, 4096, 32768),
    write_rows=(64, 512),
    pool_bytes=4 << 30,
    copy_bytes=4 << 30,
    copies=8,
    writes=200,
    seconds=0.02,
    calls=7,
    most_turns=16,
)
SMALL = Sizes(
    shapes=("smollm2-135m",),
    block_sizes=(16,),
    batches=(2,),
    contexts=(32, 64),
    write_rows=(8,),
    pool_bytes=1 << 20,
    copy_bytes=1 << 20,
    copies=1,
    writes=1,
    seconds=0.0,
    calls=3,
    most_turns=2,
)


@dataclass(frozen=True)
class Decode:
    shape: str
    block_size: int
    batch: int
    context: int

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def blocks(self) -> int:
        return self.batch * -(-self.context // self.block_size)

    @property
    def bytes(self) -> int:
        """Each key and value of each sequence once, queries and results once, and the block tables."""
        heads = 2 * self.context * self.model.num_kv_heads + 2 * self.model.num_heads
        return self.batch * heads * self.model.head_dim * DTYPE.dtype.itemsize + 4 * self.blocks

    def turns(self, most: int) -> int:
        """Tables to take turns with, so that what they read is several times a cache."""
        return min(most, -(-2 * _CACHE_BYTES // self.bytes))

    def __str__(self) -> str:
        return f"{self.shape}, block size {self.block_size}, batch {self.batch}, context {self.context}"


def run(part: Part) -> None:
    sizes = SMALL if part.dry_run else FULL
    copy = copy_bandwidth(min(sizes.copy_bytes, free_bytes() // 16), sizes.copies, sizes.calls)
    part.put(copy=copy, decode=[], write=[], goals=[], skipped=[])
    part.note(f"a copy moves {copy['bytes_per_second'] / 1e9:.0f} GB/s")
    # Those with a goal come first, lest the time ends before them.
    decodes = [
        Decode(shape, block_size, batch, context)
        for batch in sizes.batches
        for context in sizes.contexts
        for shape in sizes.shapes
        for block_size in sizes.block_sizes
    ]
    decodes.sort(key=lambda decode: (decode.batch, decode.context) not in GOALS)
    for block_size in sizes.block_sizes:
        measure_writes(part, SHAPES[sizes.shapes[0]], block_size, sizes.write_rows, sizes.writes, sizes.calls)
        for shape in _of_one_pool(sizes.shapes):
            same_pool = [d for d in decodes if d.block_size == block_size and d.shape in shape]
            _measure_decodes(part, sizes, same_pool, copy["bytes_per_second"])
    part.put(complete=len(part.result["decode"]) == len(decodes))


def _of_one_pool(shapes: tuple[str, ...]) -> Iterator[list[str]]:
    """Shapes that differ in the query heads alone read the same pool."""
    pools: dict[tuple[int, int], list[str]] = {}
    for name in shapes:
        pools.setdefault((SHAPES[name].num_kv_heads, SHAPES[name].head_dim), []).append(name)
    yield from pools.values()


def _measure_decodes(part: Part, sizes: Sizes, decodes: list[Decode], copy: float) -> None:
    model, block_size = decodes[0].model, decodes[0].block_size
    block_bytes = 2 * block_size * model.num_kv_heads * model.head_dim * DTYPE.dtype.itemsize
    num_blocks = int(min(sizes.pool_bytes, 0.6 * free_bytes()) // block_bytes)
    heads = model.num_kv_heads, model.head_dim
    pool = random_pool(init_kv_pool(num_blocks, block_size, *heads, DTYPE, part.implementation))
    pool_bytes = sum(array.nbytes for array in pool.arrays)
    part.note(f"block size {block_size}: compiling {len(decodes)} programs, a pool of {pool_bytes / 1e9:.2f} GB")
    if pool_bytes < 2 * _CACHE_BYTES and not part.dry_run:
        part.put(skipped=[*part.result["skipped"], f"block size {block_size}: only {pool_bytes} bytes for the pool"])
        return
    with ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1)) as workers:
        programs = [workers.submit(_compile_decode, part, sizes, decode, pool, copy) for decode in decodes]
        # Compiling is over before the first is measured: it would take the time of what starts the kernels.
    for decode, program in zip(decodes, programs, strict=True):
        if not part.has_time_for(2):
            part.note("the time is up")
            return
        try:
            row = _measure_decode(sizes, decode, program.result(), pool, copy)
        except Exception as error:
            part.fail(f"{decode}: {one_line(error)}")
            continue
        goal = GOALS.get((decode.batch, decode.context))
        if goal is not None:
            met = {**asdict(decode), "goal": goal, "share": row["share_of_copy"], "met": row["share_of_copy"] >= goal}
            part.put(goals=[*part.result["goals"], met])
        part.put(decode=[*part.result["decode"], row])
        part.note(f"{decode}: {row['median_us']:.1f} us, {row['share_of_copy']:.1%} of a copy")


@dataclass(frozen=True)
class _Program:
    compiled: jax.stages.Compiled
    iterations: int


def _compile_decode(part: Part, sizes: Sizes, decode: Decode, pool: KVPool, copy: float) -> _Program | None:
    """None when the time is up."""
    if not part.has_time_for(10):
        return None
    turns = decode.turns(sizes.most_turns)
    iterations = max(1, round(sizes.seconds / turns / (decode.bytes / copy + 5e-6)))
    q, tables, first, count = _decode_inputs(decode, turns, pool)

    def attend(pool: KVPool, q: Array, tables: tuple[Array, ...], first: Array, count: Array) -> Array:
        def one_each(_: Any, q: Array) -> Array:
            for table in tables:
                q = paged_attention(q, pool, table, first, count, scale=decode.model.head_dim**-0.5)
            return q

        return jax.lax.fori_loop(0, iterations, one_each, q)

    return _Program(jax.jit(attend).lower(pool, q, tables, first, count).compile(), iterations)


def _decode_inputs(decode: Decode, turns: int, pool: KVPool) -> tuple[Array, tuple[Array, ...], Array, Array]:
    model, rng = decode.model, np.random.default_rng(1)
    entries = decode.blocks * turns
    rounds = -(-entries // pool.spec.num_blocks)
    blocks = np.concatenate([rng.permutation(pool.spec.num_blocks) for _ in range(rounds)])[:entries].astype(np.int32)
    q = rng.standard_normal((decode.batch, 1, model.num_heads, model.head_dim), np.float32)
    tables = tuple(map(jnp.asarray, blocks.reshape(turns, decode.batch, -1)))
    first = jnp.full(decode.batch, decode.context - 1, jnp.int32)
    return jnp.asarray(q, DTYPE), tables, first, jnp.ones(decode.batch, jnp.int32)


def _measure_decode(
    sizes: Sizes, decode: Decode, program: _Program | None, pool: KVPool, copy: float
) -> dict[str, Any]:
    if program is None:
        raise TimeoutError("not compiled: the time is up")
    turns = decode.turns(sizes.most_turns)
    arguments = pool, *_decode_inputs(decode, turns, pool)
    if not bool(jnp.isfinite(program.compiled(*arguments)).all()):
        raise ValueError("the result is not finite")
    each = program.iterations * turns
    seconds = [s / each for s in seconds_of(lambda: program.compiled(*arguments), sizes.calls)]
    rate = decode.bytes / median(seconds)
    return {
        **asdict(decode),
        "bytes": decode.bytes,
        **summary(seconds),
        "calls": sizes.calls,
        "attentions_per_call": each,
        "bytes_per_second": rate,
        "share_of_copy": rate / copy,
        "is_in_cache": turns * decode.bytes < 2 * _CACHE_BYTES,
    }
