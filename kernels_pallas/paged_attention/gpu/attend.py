"""Paged attention on GPUs, as our own Pallas kernels for the Triton backend.

One kernel serves decode and prefill. A program takes one tile, one KV head, some of the tile's rows and a *part* of
their context; its rows are (token, query head of the group) pairs, so a group reads its keys and values once. Where the
tiles alone would not fill the chip, as in decode of few sequences, each context is cut in several parts (split-KV,
Flash-Decoding) and a second kernel merges what they found; else there is one part, and the first kernel divides.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.gpu.kernels import merge_kernel, paged_attention_kernel
from kernels_pallas.paged_attention.gpu.plan import num_parts, tile_sizes
from kernels_pallas.paged_attention.interface import DTYPES, HEAD_DIMS, PoolSpec, Variant, check_dtype


@dataclass(frozen=True)
class GPU:
    """`interpret` runs the kernels' own lines on any platform, slowly.

    Layout: K and V apart, `[num_blocks + 1, num_kv_heads, block_size, head_dim]` each. A program reads one KV head, so
    its share of a block is one contiguous run (4 KB at 16 positions of 128 in bfloat16). XLA's GPU compiler makes the
    write a scatter in place, inside a loop too, as it does with positions before heads.
    """

    interpret: bool = False

    def check(self, spec: PoolSpec) -> None:
        """Other block sizes would run, but 16 positions are the fewest that a tensor core multiplies, and tests and
        tables hold for their multiples."""
        if spec.head_dim not in HEAD_DIMS or spec.block_size % 16 or spec.dtype.name not in DTYPES:
            raise NotImplementedError(
                f"paged attention on a GPU takes head_dim {HEAD_DIMS}, a block_size that is a multiple of 16, and "
                f"{DTYPES}, not head_dim {spec.head_dim}, block_size {spec.block_size}, {spec.dtype.name}; "
                "the reference implementation takes any shape"
            )

    def init_arrays(self, spec: PoolSpec) -> tuple[Array, ...]:
        shape = (spec.num_blocks + 1, spec.num_kv_heads, spec.block_size, spec.head_dim)
        return jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype)

    def write(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        block: Int[Array, " T"],
        offset: Int[Array, " T"],
    ) -> tuple[Array, ...]:
        k_pool, v_pool = arrays
        return (
            k_pool.at[block, :, offset].set(k.astype(k_pool.dtype)),
            v_pool.at[block, :, offset].set(v.astype(v_pool.dtype)),
        )

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
        check_dtype(q.dtype, "queries", DTYPES)
        num_tiles, tokens, num_heads, head_dim = q.shape
        num_kv_heads, most_blocks = spec.num_kv_heads, block_tables.shape[1]
        group = num_heads // num_kv_heads
        sizes = tile_sizes(tokens * group, head_dim, jnp.promote_types(q.dtype, spec.dtype))
        chunks = pl.cdiv(tokens * group, sizes.rows)
        parts = num_parts(num_tiles * num_kv_heads * chunks, most_blocks * spec.block_size, sizes)

        of_tile = pl.BlockSpec((None,), lambda n, h, z: (n,))
        rows = pl.BlockSpec((None, tokens, None, group, head_dim), lambda n, h, z: (n, 0, h, 0, 0))
        pool = pl.BlockSpec((spec.num_blocks + 1, None, spec.block_size, head_dim), lambda n, h, z: (0, h, 0, 0))
        table = pl.BlockSpec((None, most_blocks), lambda n, h, z: (n, 0))
        in_specs = [table, of_tile, of_tile, rows, pool, pool]
        grouped = q.reshape(num_tiles, tokens, num_kv_heads, group, head_dim)
        operands = [block_tables, first_position, num_tokens, grouped, *arrays]
        if sinks is not None:
            in_specs.append(pl.BlockSpec((None, group), lambda n, h, z: (h, 0)))
            operands.append(sinks.astype(jnp.float32).reshape(num_kv_heads, group))

        if parts == 1:
            out_specs = [rows]
            out_shapes = [jax.ShapeDtypeStruct(grouped.shape, q.dtype)]
        else:
            part_scalars = pl.BlockSpec((None, None, tokens, None, group), lambda n, h, z: (n, z % parts, 0, h, 0))
            part_rows = pl.BlockSpec(
                (None, None, tokens, None, group, head_dim), lambda n, h, z: (n, z % parts, 0, h, 0, 0)
            )
            out_specs = [part_scalars, part_scalars, part_rows]
            scalars = (num_tiles, parts, *grouped.shape[1:4])
            out_shapes = [
                jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (scalars, scalars, (*scalars, head_dim))
            ]
        results = pl.pallas_call(
            partial(paged_attention_kernel, sizes=sizes, parts=parts, variant=variant, has_sinks=sinks is not None),
            # The programs that may have nothing to do, the last parts, come last.
            grid=(num_tiles, num_kv_heads, chunks * parts),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shapes,
            # Their class is what chooses the backend.
            compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=sizes.num_stages),
            interpret=self.interpret,
            name="paged_attention",
        )(*operands)
        if parts == 1:
            return results[0].reshape(q.shape)
        maximum, total, out = results
        return self._merge(maximum, total, out, q.dtype)

    def _merge(
        self,
        maximum: Float[Array, "N P Q Hkv G"],
        total: Float[Array, "N P Q Hkv G"],
        out: Float[Array, "N P Q Hkv G D"],
        dtype: np.dtype,
    ) -> Float[Array, "N Q H D"]:
        """A kernel, since it reads the parts that hold something only: XLA would read all, in several kernels."""
        num_tiles, parts, tokens, num_kv_heads, group, head_dim = out.shape
        num_heads = num_kv_heads * group
        scalars = pl.BlockSpec((None, parts, None, None), lambda n, q, h: (n, 0, q, h))
        rows = pl.BlockSpec((None, parts, None, None, head_dim), lambda n, q, h: (n, 0, q, h, 0))
        shape = (num_tiles, parts, tokens, num_heads)
        return pl.pallas_call(
            merge_kernel,
            grid=(num_tiles, tokens, num_heads),
            in_specs=[scalars, scalars, rows],
            out_specs=pl.BlockSpec((None, None, None, head_dim), lambda n, q, h: (n, q, h, 0)),
            out_shape=jax.ShapeDtypeStruct((num_tiles, tokens, num_heads, head_dim), dtype),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=self.interpret,
            name="paged_attention_merge",
        )(maximum.reshape(shape), total.reshape(shape), out.reshape(*shape, head_dim))
