"""Part 1: attention, compiled for the device, against the definition in float64 numpy.

The cases are drawn once, by a seeded generator, and always the same: over head dims, dtypes, decode and prefill, group
and block sizes, windows, soft caps, sinks, shared blocks, and ragged lengths at the edges of blocks and windows.
NaN stands in every place of the pool that no live position owns, in the scratch block and in the padding rows of q.
"""

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check.part import Part, one_line
from kernels_pallas.paged_attention import KVPool, init_kv_pool, paged_attention, write_kv
from tests.kernels_pallas.paged_attention.dense import dense_attention

# Of |error| <= tolerance * (1 + |value|), as in the tests. bfloat16 rounds the softmax's weights and the result to 8
# bits; the logits and the sums are float32.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
_HEAD_DIMS, _BLOCK_SIZES, _GROUPS = (64, 96, 128, 256), (16, 32, 64, 128, 256), (1, 2, 3, 4, 7, 8, 16)
_PREFILL_TOKENS = 32
_CROWD = 96
_MOST_WORKERS = 8


@dataclass(frozen=True)
class Case:
    """tiles: first position and number of tokens of each. shared: all tiles read the blocks of the longest one."""

    dtype: str
    head_dim: int
    num_kv_heads: int
    group: int
    block_size: int
    rows: int
    tiles: tuple[tuple[int, int], ...]
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False
    shared: bool = False

    def __str__(self) -> str:
        """Every field, so that a failure can be made again from the report alone."""
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


@dataclass(frozen=True)
class Sizes:
    """crowded: cases of many tiles, which fill the chip without contexts being cut."""

    cases: int
    crowded: int
    most_positions: int
    most_prefill_positions: int
    most_tiles: int


FULL = Sizes(cases=60, crowded=6, most_positions=4096, most_prefill_positions=700, most_tiles=6)
SMALL = Sizes(cases=6, crowded=0, most_positions=80, most_prefill_positions=60, most_tiles=2)


def draw_cases(sizes: Sizes, seed: int = 0) -> list[Case]:
    """Head dim, dtype and decode or prefill take turns, so that all combinations are met; the rest is drawn."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    combinations = list(itertools.product(_HEAD_DIMS, TOLERANCE, (1, _PREFILL_TOKENS)))
    rng.shuffle(combinations)
    cases: list[Case] = []
    crowded = 0
    for head_dim, dtype, rows in itertools.islice(itertools.cycle(combinations), sizes.cases):
        head_dim, rows = int(head_dim), int(rows)
        block_size = pick(*_BLOCK_SIZES)
        window = pick(None, None, 1, block_size, block_size + 1, int(rng.integers(2, 300)))
        most = sizes.most_positions if rows == 1 else sizes.most_prefill_positions
        edges = [0, block_size - 1, block_size, block_size + 1, 2 * block_size, most - rows]
        if window is not None:
            edges += [window - 1, window, window + block_size]
        is_crowded = rows == 1 and crowded < sizes.crowded
        crowded += is_crowded
        tiles = []
        for _ in range(_CROWD if is_crowded else rng.integers(1, sizes.most_tiles + 1)):
            first = min(pick(pick(*edges), int(rng.integers(most))), most - rows)
            first = first // 4 if is_crowded else first
            tiles.append((first, pick(rows, rows, int(rng.integers(rows + 1)))))
        cases.append(
            Case(
                dtype=str(dtype),
                head_dim=head_dim,
                num_kv_heads=8 if is_crowded else pick(1, 2, 4, 8) if rows == 1 else pick(1, 2),
                group=pick(1, 2, 4) if is_crowded else pick(*_GROUPS),
                block_size=block_size,
                rows=rows,
                tiles=tuple(tiles),
                sliding_window=window,
                logits_soft_cap=pick(None, None, 5.0, 50.0),
                has_sinks=pick(False, True),
                shared=pick(False, False, True),
            )
        )
    return cases


def run(part: Part) -> None:
    cases = draw_cases(SMALL if part.dry_run else FULL)
    worst: dict[str, dict[str, Any]] = {}
    checked = 0
    part.put(num_cases=len(cases), num_checked=0, tolerance=TOLERANCE, worst=worst)
    # Most of a case's time is compiling, which takes one core.
    with ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(_check, case, part): case for case in cases}
        for future in as_completed(futures):
            case = futures[future]
            try:
                error = future.result()
            except Exception as exception:
                checked += 1
                part.fail(f"{case}: {one_line(exception)}")
                continue
            if error is None:
                continue
            checked += 1
            if error.share > 1:
                part.fail(f"{case}: {error}")
            if worst.get(case.dtype, {}).get("share_of_tolerance", 0) <= error.share < math.inf:
                worst[case.dtype] = {
                    "absolute": error.absolute,
                    "share_of_tolerance": error.share,
                    "case": str(case),
                }
            part.put(num_checked=checked, worst=worst)
            if checked % 10 == 0:
                part.note(f"{checked} of {len(cases)} cases")
    part.put(num_checked=checked, complete=checked == len(cases))


@dataclass(frozen=True)
class Error:
    """absolute: the largest one. share: the largest one of what is tolerated; infinite if something is not finite."""

    absolute: float
    share: float

    @classmethod
    def of(cls, got: np.ndarray, want: np.ndarray, tolerance: float) -> "Error":
        if not np.isfinite(got).all():
            return cls(math.inf, math.inf)
        difference = np.abs(got - want)
        return cls(float(difference.max()), float((difference / (tolerance * (1 + np.abs(want)))).max()))

    def __str__(self) -> str:
        if not math.isfinite(self.share):
            return "the result is not finite"
        return f"off by {self.absolute:.2e}, {self.share:.1f} times the tolerance"


def _check(case: Case, part: Part) -> Error | None:
    """None when the time is up."""
    if not part.has_time_for(3):
        return None
    return check(case, part.implementation)


def check(case: Case, implementation: str) -> Error:
    """Write the keys and values with `write_kv`, attend, and compare."""
    rng = np.random.default_rng([case.head_dim, case.group, len(case.tiles), case.tiles[0][0]])
    dtype = jnp.dtype(case.dtype)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    first, count = (np.array(column, np.int32) for column in zip(*case.tiles, strict=True))
    lengths = np.where(count > 0, first + count, 0)
    if case.shared:
        lengths[:] = lengths.max()
    sequences = 1 if case.shared else len(lengths)
    needed = -(-lengths // case.block_size)
    num_blocks = int(needed[:sequences].sum()) + 2
    tables = np.full((len(lengths), needed.max() + 2), num_blocks, np.int32)
    free = rng.permutation(num_blocks)
    for n in range(sequences):
        tables[n, : needed[n]], free = free[: needed[n]], free[needed[n] :]
    if case.shared:
        tables[:] = tables[0]
    heads = (case.num_kv_heads, case.head_dim)
    keys, values = ([normal(int(lengths[n]), *heads) for n in range(sequences)] for _ in range(2))
    pool = _pool(case, implementation, num_blocks, keys, values, tables)

    num_heads = case.num_kv_heads * case.group
    q = normal(len(lengths), case.rows, num_heads, case.head_dim)
    for n, tokens in enumerate(count):
        q[n, tokens:] = np.nan
    sinks = 2 * rng.standard_normal(num_heads).astype(np.float32) if case.has_sinks else None
    options = {
        "scale": case.head_dim**-0.5,
        "sliding_window": case.sliding_window,
        "logits_soft_cap": case.logits_soft_cap,
    }
    got = jax.jit(partial(paged_attention, **options))(q, pool, tables, first, count, sinks=sinks)
    if case.shared:
        keys, values = keys * len(lengths), values * len(lengths)
    want = dense_attention(q.astype(np.float64), keys, values, list(first), list(count), sinks=sinks, **options)
    return Error.of(np.asarray(got).astype(np.float64), want, TOLERANCE[case.dtype])


def _pool(
    case: Case,
    implementation: str,
    num_blocks: int,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    tables: np.ndarray,
) -> KVPool:
    """All rows in one write, padded to a power of two with NaN for the scratch block, so that few shapes compile."""
    pool = init_kv_pool(
        num_blocks, case.block_size, case.num_kv_heads, case.head_dim, jnp.dtype(case.dtype), implementation
    )
    pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)
    position = np.concatenate([np.arange(len(k)) for k in keys])
    sequence = np.repeat(np.arange(len(keys)), [len(k) for k in keys])
    padding = (1 << len(position).bit_length()) - len(position)
    block = np.pad(tables[sequence, position // case.block_size], (0, padding), constant_values=num_blocks)
    offset = np.pad(position % case.block_size, (0, padding)).astype(np.int32)
    rows = [np.pad(np.concatenate(x), ((0, padding), (0, 0), (0, 0)), constant_values=np.nan) for x in (keys, values)]
    return jax.jit(write_kv, donate_argnums=0)(pool, *rows, block, offset)
