"""Paged attention for TPU: a Mosaic kernel that streams each tile's own blocks from HBM, two buffers deep.

Layout: `[num_blocks + 1, block_size, num_kv_heads * 2 * head_dim]`, where head `h` has its key and then its value at
lanes `2 * h * head_dim` onwards. A block is one contiguous matrix with positions in sublanes and no padding in lanes,
the shape in which the matrix unit takes keys and values; a token is one row, which XLA's scatter writes in place.

head_dim 64 has key and value in the same 128 lanes, head_dim 96 two heads in 384, and a slice of lanes at another
multiple than 128 costs a rotation of every register. There, queries are padded with zeros to the lanes of a whole
*head group*: their product with it is that with the keys, and of the weights' product with it the lanes of the values
are taken. The matrix unit works in squares of 128 anyway.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import PoolSpec, Variant
from kernels_pallas.paged_attention.shapes import HEAD_DIMS
from kernels_pallas.paged_attention.tpu_tiles import blocks_per_turn, num_cores

_LANES = 128
# Finite, so that a row without any key yet gives exp(-inf - m) = 0 and not exp(-inf + inf) = NaN.
_LOWEST = -1e30
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class _HeadGroup:
    """Key heads that are multiplied at once. lanes: of the pool; key, value: the lanes of it that the products take."""

    heads: int
    lanes: int
    key: slice
    value: slice

    @classmethod
    def of(cls, head_dim: int) -> "_HeadGroup":
        if head_dim % _LANES == 0:
            return cls(1, 2 * head_dim, slice(0, head_dim), slice(head_dim, 2 * head_dim))
        heads = next(n for n in range(1, _LANES) if n * 2 * head_dim % _LANES == 0)
        lanes = heads * 2 * head_dim
        return cls(heads, lanes, slice(0, lanes), slice(0, lanes))

    @property
    def is_split(self) -> bool:
        """Keys and values have lanes of their own."""
        return self.key != self.value


@dataclass(frozen=True)
class TPU:
    """`interpret` runs the kernel's code without a TPU."""

    interpret: bool = False

    def check(self, spec: PoolSpec) -> None:
        sublanes = 8 * 4 // spec.dtype.itemsize  # rows of a tile in memory
        problems = []
        if spec.dtype.name not in _DTYPES:
            problems.append(f"dtype {spec.dtype.name} (takes {', '.join(_DTYPES)})")
        elif spec.block_size % sublanes:
            problems.append(f"block_size {spec.block_size} (takes multiples of {sublanes} for {spec.dtype.name})")
        if spec.head_dim not in HEAD_DIMS:
            problems.append(f"head_dim {spec.head_dim} (takes {', '.join(map(str, HEAD_DIMS))})")
        elif spec.num_kv_heads % _HeadGroup.of(spec.head_dim).heads:
            heads = _HeadGroup.of(spec.head_dim).heads
            problems.append(f"{spec.num_kv_heads} KV heads of {spec.head_dim} (takes multiples of {heads})")
        if problems:
            raise NotImplementedError(
                f"the tpu paged attention does not take {', '.join(problems)}; implementation='reference' takes any shape"
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
        group = _HeadGroup.of(spec.head_dim)
        num_tiles, rows, num_heads, head_dim = q.shape
        cores = num_cores()
        padding = -num_tiles % cores
        tiles = [jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)) for x in (q, block_tables)]
        first_position, num_tokens = (jnp.pad(x.astype(jnp.int32), (0, padding)) for x in (first_position, num_tokens))
        out = _attend(
            _in_groups(tiles[0].astype(jnp.promote_types(q.dtype, pool.dtype)), spec, group),
            pool,
            tiles[1].astype(jnp.int32),
            first_position,
            num_tokens,
            _start(sinks, num_heads, spec, group, rows),
            group=group,
            query_rows=rows,
            variant=variant,
            cores=cores,
            out_dtype=q.dtype,
            interpret=self.interpret,
        )
        return _from_groups(out, spec, group, rows)[:num_tiles]


def _in_groups(q: Float[Array, "N Q H D"], spec: PoolSpec, group: _HeadGroup) -> Float[Array, "N Hg R L"]:
    """Rows of a head group are its query heads' tokens, head by head; each stands at the lanes of its key."""
    n, rows, _, d = q.shape
    heads = spec.num_kv_heads // group.heads
    q = q.reshape(n, rows, heads, group.heads, -1, d).transpose(0, 2, 3, 4, 1, 5)  # N Hg heads G Q D
    if not group.is_split:
        own = jnp.eye(group.heads, dtype=bool)[:, None, None, :, None]
        q = jnp.where(own, q[..., None, :], 0)  # N Hg heads G Q heads D
        q = jnp.pad(q, ((0, 0),) * 6 + ((0, d),))
    return q.reshape(n, heads, -1, group.key.stop)


def _from_groups(out: Float[Array, "N Hg R L"], spec: PoolSpec, group: _HeadGroup, rows: int) -> Array:
    n, d = out.shape[0], spec.head_dim
    if group.is_split:
        out = out.reshape(n, spec.num_kv_heads, -1, rows, d)
    else:
        out = out.reshape(n, spec.num_kv_heads // group.heads, group.heads, -1, rows, group.lanes)
        values = [out[:, :, i, ..., (2 * i + 1) * d : (2 * i + 2) * d] for i in range(group.heads)]
        out = jnp.stack(values, axis=2).reshape(n, spec.num_kv_heads, -1, rows, d)
    return out.transpose(0, 3, 1, 2, 4).reshape(n, rows, -1, d)


def _start(
    sinks: Float[Array, " H"] | None, num_heads: int, spec: PoolSpec, group: _HeadGroup, rows: int
) -> Float[Array, "2 Hg R 1"]:
    """The maximum and the sum that the softmax begins with: a sink is a logit that is there before the first key."""
    maximum = jnp.full(num_heads, _LOWEST) if sinks is None else sinks.astype(jnp.float32)
    start = jnp.stack([maximum, jnp.full(num_heads, 0.0 if sinks is None else 1.0)])
    return jnp.repeat(start.reshape(2, spec.num_kv_heads // group.heads, -1), rows, axis=2)[..., None]


def _next_used(num_tokens: Int[Array, " N"], cores: int) -> Int[Array, " N+cores"]:
    """For each core its first tile with tokens, then for each tile the next one of its core; N where there is none."""
    n = len(num_tokens)
    used = jnp.where(num_tokens > 0, jnp.arange(n), n).reshape(-1, cores)
    from_here = jax.lax.cummin(used, axis=0, reverse=True)
    return jnp.concatenate([from_here, jnp.full((1, cores), n)]).reshape(-1)


def _attend(
    q: Float[Array, "N Hg R L"],
    pool: Float[Array, "blocks block_size lanes"],
    block_tables: Int[Array, "N M"],
    first_position: Int[Array, " N"],
    num_tokens: Int[Array, " N"],
    start: Float[Array, "2 Hg R 1"],
    *,
    group: _HeadGroup,
    query_rows: int,
    variant: Variant,
    cores: int,
    out_dtype: np.dtype,
    interpret: bool,
) -> Float[Array, "N Hg R L"]:
    n, heads, rows, _ = q.shape
    _, block_size, lanes = pool.shape
    blocks = blocks_per_turn(block_size, lanes, pool.dtype)
    out_lanes = group.value.stop - group.value.start

    def tile(core: Array, i: Array, *_: Array) -> Array:
        return i * cores + core

    def own(core: Array, i: Array, *scalars: Array) -> tuple[Array | int, ...]:
        return tile(core, i), 0, 0

    def following(core: Array, i: Array, first: Array, count: Array, next_used: Array) -> tuple[Array | int, ...]:
        return jnp.minimum(next_used[tile(core, i) + cores], n - 1), 0, 0

    table = (None, 1, block_tables.shape[1])
    return pl.pallas_call(
        partial(_kernel, group=group, query_rows=query_rows, variant=variant, cores=cores),
        out_shape=jax.ShapeDtypeStruct((n, heads, rows, out_lanes), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, n // cores),
            in_specs=[
                pl.BlockSpec(table, own, memory_space=pltpu.SMEM),
                pl.BlockSpec(table, following, memory_space=pltpu.SMEM),
                pl.BlockSpec((None, *q.shape[1:]), lambda *at: (*own(*at), 0)),
                pl.BlockSpec(start.shape, lambda *at: (0, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, heads, rows, out_lanes), lambda *at: (*own(*at), 0)),
            scratch_shapes=[
                pltpu.VMEM((2, blocks, block_size, lanes), pool.dtype),
                pltpu.VMEM((2, heads, rows, 1), jnp.float32),
                pltpu.VMEM((heads, rows, out_lanes), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            # They cost as many instructions as the start of a copy; the interpreter checks the bounds in the tests.
            disable_bounds_checks=True,
        ),
        cost_estimate=_cost(q, pool, block_tables.shape[1], variant, group, query_rows, out_lanes, out_dtype),
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
    group: _HeadGroup,
    query_rows: int,
    out_lanes: int,
    out_dtype: np.dtype,
) -> pl.CostEstimate:
    """What XLA schedules by: every table full, each block read once, queries and results moved once."""
    n, heads, rows, key_lanes = q.shape
    _, block_size, lanes = pool.shape
    blocks = table_width
    if variant.sliding_window is not None:
        blocks = min(blocks, (variant.sliding_window + query_rows - 2) // block_size + 2)
    logits = n * heads * rows * blocks * block_size
    block_bytes = block_size * lanes * pool.dtype.itemsize
    out_bytes = n * heads * rows * out_lanes * out_dtype.itemsize
    return pl.CostEstimate(
        flops=2 * logits * (key_lanes + out_lanes),
        transcendentals=logits * (1 if variant.logits_soft_cap is None else 2),
        bytes_accessed=n * blocks * block_bytes + q.size * q.dtype.itemsize + out_bytes,
    )


def _kernel(
    # prefetched scalars
    first_position,
    num_tokens,
    next_used,
    # inputs
    table,
    next_table,
    q,
    start,
    pool,
    # output
    out,
    # scratch
    buffers,
    softmax,
    acc,
    first_buffer,
    arrived,
    *,
    group: _HeadGroup,
    query_rows: int,
    variant: Variant,
    cores: int,
) -> None:
    """One tile. Its turns read `blocks` blocks each; while one is computed, the next one's arrive in the other buffer.

    The last turn fetches the first one of the next tile that has tokens, so only a core's very first turn waits for a
    whole read. first_buffer: where this tile's first turn is.
    """
    tile = pl.program_id(1) * cores + pl.program_id(0)
    after = next_used[tile + cores]
    _, blocks, block_size, _ = buffers.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def block_range(tile):
        """The blocks that a tile's tokens see."""
        context_len = first_position[tile] + num_tokens[tile]
        return variant.first_key(first_position[tile]) // block_size, pl.cdiv(context_len, block_size)

    def copies(table, tile, turn, buffer, act):
        begin, end = block_range(tile)
        begin = begin + turn * blocks

        def one(i):
            source = pool.at[table[0, begin + i]]
            act(pltpu.make_async_copy(source, buffers.at[buffer, i], arrived.at[buffer]))

        _for_each(jnp.minimum(end - begin, blocks), one)

    def fetch(*where):
        copies(*where, lambda copy: copy.start())

    def wait(*where):
        copies(*where, lambda copy: copy.wait())

    begin, end = block_range(tile)
    num_turns = jnp.where(num_tokens[tile] > 0, pl.cdiv(end - begin, blocks), 0)

    @pl.when(tile == next_used[tile % cores])
    def _():
        first_buffer[0] = 0
        fetch(table, tile, 0, 0)

    buffer_0 = first_buffer[0]
    softmax[...] = start[...]
    acc[...] = jnp.zeros_like(acc)
    # Rows are tokens of one head after another; those past the last token see nothing.
    row = jax.lax.broadcasted_iota(jnp.int32, (q.shape[1], 1), 0) % query_rows
    query_position = jnp.where(row < num_tokens[tile], first_position[tile] + row, -1)

    def turn(t, _):
        buffer = (buffer_0 + t) % 2
        is_last = t == num_turns - 1

        @pl.when(jnp.logical_not(is_last))
        def _():
            fetch(table, tile, t + 1, 1 - buffer)

        @pl.when(is_last & (after < pl.num_programs(1) * cores))
        def _():
            fetch(next_table, after, 0, 1 - buffer)

        wait(table, tile, t, buffer)
        first_key = (begin + t * blocks) * block_size

        @pl.when(is_last)
        def _():
            # 0 * NaN is NaN: what lies past the context must not reach the product at all.
            position = first_key + _positions((blocks, block_size, 1), block_size)
            live = position < first_position[tile] + num_tokens[tile]
            buffers[buffer] = jnp.where(live, buffers[buffer], 0)

        position = first_key + jax.lax.broadcasted_iota(jnp.int32, (1, blocks * block_size), 1)
        visible = variant.sees(query_position, position)
        for g in range(q.shape[0]):

            def read(lanes, g=g):
                lanes = slice(g * group.lanes + lanes.start, g * group.lanes + lanes.stop)
                return buffers[buffer, :, :, lanes].reshape(blocks * block_size, -1).astype(q.dtype)

            key = read(group.key)
            value = read(group.value) if group.is_split else key
            products = jax.lax.dot_general(
                q[g], key, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            logits = jnp.where(visible, variant.logits(products), -jnp.inf)
            maximum = jnp.maximum(softmax[0, g], logits.max(axis=1, keepdims=True))
            weights = jnp.exp(logits - maximum)
            shrink = jnp.exp(softmax[0, g] - maximum)
            softmax[0, g] = maximum
            softmax[1, g] = softmax[1, g] * shrink + weights.sum(axis=1, keepdims=True)
            acc[g] = acc[g] * shrink + jnp.dot(
                weights.astype(value.dtype), value, precision=precision, preferred_element_type=jnp.float32
            )
        return _

    jax.lax.fori_loop(0, num_turns, turn, None)
    first_buffer[0] = (buffer_0 + num_turns) % 2
    total = softmax[1]
    live = (row < num_tokens[tile])[None]
    out[...] = jnp.where(live, acc[...] / jnp.where(total > 0, total, 1), 0).astype(out.dtype)


def _for_each(count, body) -> None:
    """Four at a time, since the scalar unit takes as long for the addresses of one copy as for those of four."""
    jax.lax.fori_loop(0, count // 4, lambda i, _: [body(4 * i + j) for j in range(4)] and None, None)
    jax.lax.fori_loop(count // 4 * 4, count, lambda i, _: body(i), None)


def _positions(shape: tuple[int, int, int], block_size: int) -> Int[Array, "blocks block_size 1"]:
    block = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return block * block_size + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
