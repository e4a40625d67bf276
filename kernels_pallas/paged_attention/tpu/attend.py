"""Paged attention for TPU: a Mosaic kernel that streams each tile's own blocks from HBM, two buffers deep."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import DTYPES, HEAD_DIMS, LOWEST, PoolSpec, Variant, check_dtype
from kernels_pallas.paged_attention.tpu.head_groups import HeadGroup, from_groups, in_groups
from kernels_pallas.paged_attention.tpu.kernel import paged_attention_kernel
from kernels_pallas.paged_attention.tpu.plan import blocks_per_turn, num_cores

# One block must fit each of the two buffers, and a tile's queries, results and sums what VMEM is left.
_MOST_BLOCK_BYTES = 4 * 2**20
_MOST_TILE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class TPU:
    """`interpret` runs the kernel's code on any platform, slowly.

    Layout: `[num_blocks + 1, block_size, num_kv_heads * 2 * head_dim]`, where head `h` has its key and then its value
    from lane `2 * h * head_dim` on. A block is one contiguous matrix, positions in sublanes and no padding in lanes:
    the form in which the matrix unit takes keys and values; a token is one row, which XLA's scatter writes in place.
    """

    interpret: bool = False

    def check(self, spec: PoolSpec) -> None:
        sublanes = 8 * 4 // spec.dtype.itemsize  # rows of a tile in memory
        problems = []
        block_bytes = spec.block_size * spec.num_kv_heads * 2 * spec.head_dim * spec.dtype.itemsize
        if spec.dtype.name not in DTYPES:
            problems.append(f"dtype {spec.dtype.name} (takes {', '.join(DTYPES)})")
        elif spec.block_size % sublanes:
            problems.append(f"block_size {spec.block_size} (takes multiples of {sublanes} for {spec.dtype.name})")
        if spec.head_dim not in HEAD_DIMS:
            problems.append(f"head_dim {spec.head_dim} (takes {', '.join(map(str, HEAD_DIMS))})")
        elif spec.num_kv_heads % HeadGroup.of(spec.head_dim).heads:
            heads = HeadGroup.of(spec.head_dim).heads
            problems.append(f"{spec.num_kv_heads} KV heads of {spec.head_dim} (takes multiples of {heads})")
        if block_bytes > _MOST_BLOCK_BYTES:
            problems.append(
                f"block_size {spec.block_size} of {spec.num_kv_heads} KV heads of {spec.head_dim}, "
                f"{block_bytes / 2**20:g} MiB a block (takes up to {_MOST_BLOCK_BYTES // 2**20})"
            )
        if problems:
            raise NotImplementedError(
                f"paged attention on a TPU does not take {', '.join(problems)}; "
                "the reference implementation takes any shape"
            )

    def init_arrays(self, spec: PoolSpec) -> tuple[Array, ...]:
        shape = (spec.num_blocks + 1, spec.block_size, spec.num_kv_heads * 2 * spec.head_dim)
        return (jnp.zeros(shape, spec.dtype),)

    def write(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        block: Int[Array, " T"],
        offset: Int[Array, " T"],
    ) -> tuple[Array, ...]:
        (pool,) = arrays
        rows = jnp.concatenate([k, v], axis=-1).astype(pool.dtype).reshape(-1, pool.shape[2])
        return (pool.at[block, offset].set(rows),)

    def attend(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        q: Float[Array, "N Q H D"],
        block_tables: Int[Array, "N M"],
        first_position: Int[Array, " N"],
        num_tokens: Int[Array, " N"],
        sinks: Float[Array, " H"] | None,
        variant: Variant,
    ) -> Float[Array, "N Q H D"]:
        (pool,) = arrays
        group = HeadGroup.of(spec.head_dim)
        num_tiles, rows, num_heads, head_dim = q.shape
        check_dtype(q.dtype, "queries", DTYPES)
        most_rows = _MOST_TILE_BYTES // (num_heads * max(head_dim, 128) * 4)
        if rows > most_rows:
            raise NotImplementedError(
                f"paged attention on a TPU takes tiles of up to {most_rows} tokens of {num_heads} heads of {head_dim}, "
                f"not {rows}"
            )
        cores = min(num_cores(), num_tiles)
        padding = -num_tiles % cores
        q, block_tables = jnp.pad(q, ((0, padding),) + ((0, 0),) * 3), jnp.pad(block_tables, ((0, padding), (0, 0)))
        first_position, num_tokens = jnp.pad(first_position, (0, padding)), jnp.pad(num_tokens, (0, padding))
        out = _attend(
            in_groups(q.astype(jnp.promote_types(q.dtype, pool.dtype)), spec.num_kv_heads, group),
            pool,
            block_tables.astype(jnp.int32),
            first_position.astype(jnp.int32),
            num_tokens.astype(jnp.int32),
            _start(sinks, num_heads, spec.num_kv_heads // group.heads, rows),
            group=group,
            query_rows=rows,
            variant=variant,
            cores=cores,
            out_dtype=q.dtype,
            interpret=self.interpret,
        )
        return from_groups(out, spec.num_kv_heads, rows, group)[:num_tiles]


def _start(sinks: Float[Array, " H"] | None, num_heads: int, head_groups: int, rows: int) -> Float[Array, "Hg R 1"]:
    """The maximum that each row's softmax begins with."""
    maximum = jnp.full(num_heads, LOWEST) if sinks is None else sinks.astype(jnp.float32)
    return jnp.repeat(maximum.reshape(head_groups, -1), rows, axis=1)[..., None]


def _next_used(num_tokens: Int[Array, " N"], cores: int) -> Int[Array, " N+cores"]:
    """For each core its first tile with tokens, then for each tile the next one of its core; N where there is none."""
    n = len(num_tokens)
    used = jnp.where(num_tokens > 0, jnp.arange(n), n).reshape(-1, cores)
    from_here = jax.lax.cummin(used, axis=0, reverse=True)
    return jnp.concatenate([from_here, jnp.full((1, cores), n)]).reshape(-1)


def _attend(
    q: Float[Array, "N Hg R moved"],
    pool: Float[Array, "blocks block_size lanes"],
    block_tables: Int[Array, "N M"],
    first_position: Int[Array, " N"],
    num_tokens: Int[Array, " N"],
    start: Float[Array, "Hg R 1"],
    *,
    group: HeadGroup,
    query_rows: int,
    variant: Variant,
    cores: int,
    out_dtype: np.dtype,
    interpret: bool,
) -> Float[Array, "N Hg R moved"]:
    n, heads, rows, _ = q.shape
    _, block_size, lanes = pool.shape
    blocks = blocks_per_turn(block_size, lanes, pool.dtype, rows)

    def tile(core: Array, i: Array, *_: Array) -> Array:
        return i * cores + core

    def own(core: Array, i: Array, *scalars: Array) -> tuple[Array | int, ...]:
        return tile(core, i), 0, 0

    def following(core: Array, i: Array, first: Array, count: Array, next_used: Array) -> tuple[Array | int, ...]:
        return jnp.minimum(next_used[tile(core, i) + cores], n - 1), 0, 0

    table = (None, 1, block_tables.shape[1])
    return pl.pallas_call(
        partial(paged_attention_kernel, group=group, query_rows=query_rows, variant=variant, cores=cores),
        out_shape=jax.ShapeDtypeStruct(q.shape, out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, n // cores),
            in_specs=[
                pl.BlockSpec(table, own, memory_space=pltpu.SMEM),
                pl.BlockSpec(table, following, memory_space=pltpu.SMEM),
                pl.BlockSpec((None, *q.shape[1:]), lambda *at: (*own(*at), 0)),
                pl.BlockSpec(start.shape, lambda *at: (0, 0, 0), pipeline_mode=pl.Buffered(1)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, *q.shape[1:]), lambda *at: (*own(*at), 0)),
            scratch_shapes=[
                pltpu.VMEM((2, blocks, block_size, lanes), pool.dtype),
                pltpu.VMEM((2, heads, rows, 1), jnp.float32),
                pltpu.VMEM((heads, rows, group.value.stop - group.value.start), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            # They cost as many instructions as the start of a copy; the interpreter checks the bounds in the tests.
            disable_bounds_checks=True,
        ),
        cost_estimate=_cost(q, pool, block_tables.shape[1], variant, group, query_rows, out_dtype),
        interpret=interpret,
        name="paged_attention",
    )(
        first_position,
        num_tokens,
        _next_used(num_tokens, cores),
        block_tables[:, None],
        block_tables[:, None],
        q,
        start,
        pool,
    )


def _cost(
    q: Array,
    pool: Array,
    table_width: int,
    variant: Variant,
    group: HeadGroup,
    query_rows: int,
    out_dtype: np.dtype,
) -> pl.CostEstimate:
    """What XLA schedules by: every table full, each block read once, queries and results moved once."""
    n, heads, rows, _ = q.shape
    _, block_size, lanes = pool.shape
    blocks = table_width
    if variant.sliding_window is not None:
        blocks = min(blocks, (variant.sliding_window + query_rows - 2) // block_size + 2)
    logits = n * heads * rows * blocks * block_size
    block_bytes = block_size * lanes * pool.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * logits * (group.key.stop - group.key.start),
        transcendentals=logits * (1 if variant.logits_soft_cap is None else 2),
        bytes_accessed=n * blocks * block_bytes + q.size * (q.dtype.itemsize + out_dtype.itemsize),
    )
