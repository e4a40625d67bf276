"""What an implementation has to do, in plain jnp: writes to the pool, and attention over it."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import PoolSpec, Variant, check_dtype
from kernels_pallas.paged_attention.reference.lots import attend_tiles
from kernels_pallas.paged_attention.reference.pages import init_pages, page_size


@dataclass(frozen=True)
class Reference:
    def check(self, spec: PoolSpec) -> None:
        """Any shape will do."""
        check_dtype(spec.dtype, "pools", ("bfloat16", "float16", "float32"))

    def init_arrays(self, spec: PoolSpec) -> tuple[Array, ...]:
        return init_pages(spec)

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
        size = page_size(spec.block_size)
        page, offset = block * (spec.block_size // size) + offset // size, offset % size
        return (
            k_pool.at[page, :, :, offset].set(k.astype(k_pool.dtype)),
            v_pool.at[page, :, offset].set(v.astype(v_pool.dtype)),
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
        num_tiles, rows, num_heads, head_dim = q.shape
        group = num_heads // spec.num_kv_heads
        grouped = q.reshape(num_tiles, rows, spec.num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
        grouped_sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(spec.num_kv_heads, group)
        out = attend_tiles(spec, grouped, arrays, block_tables, first_position, num_tokens, grouped_sinks, variant)
        return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
