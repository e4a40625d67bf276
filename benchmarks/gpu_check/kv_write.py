"""How long a write of new keys and values takes."""

import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.gpu_check.measure import summary
from benchmarks.gpu_check.part import Part, one_line
from kernels_pallas.paged_attention import KVPool, init_kv_pool, write_kv
from kernels_pallas.paged_attention.shapes import Shape


def measure_writes(
    part: Part, shape: Shape, block_size: int, write_rows: tuple[int, ...], iterations: int, calls: int
) -> None:
    """`write_kv` alone, which is XLA's scatter. So few bytes that a copy's rate is out of reach: the time counts."""
    num_blocks = 2 * max(write_rows)
    for rows in write_rows:
        rng = np.random.default_rng(2)
        k, v = (
            jnp.asarray(rng.standard_normal((rows, shape.num_kv_heads, shape.head_dim), np.float32), jnp.bfloat16)
            for _ in range(2)
        )
        block = jnp.asarray(rng.permutation(num_blocks)[:rows], jnp.int32)

        @partial(jax.jit, donate_argnums=0)
        def write(pool: KVPool, k: Array, v: Array, block: Array) -> KVPool:
            def one(i: Array, pool: KVPool) -> KVPool:
                return write_kv(pool, k, v, block, jnp.full(block.shape, i % block_size))

            return jax.lax.fori_loop(0, iterations, one, pool)

        try:
            pool = init_kv_pool(
                num_blocks, block_size, shape.num_kv_heads, shape.head_dim, jnp.bfloat16, part.implementation
            )
            compiled = write.lower(pool, k, v, block).compile()
            seconds = []
            for _ in range(calls + 1):
                jax.block_until_ready(pool)
                start = time.perf_counter()
                pool = jax.block_until_ready(compiled(pool, k, v, block))
                seconds.append((time.perf_counter() - start) / iterations)
            memory = compiled.memory_analysis()
            row = {
                "rows": rows,
                "block_size": block_size,
                "bytes": 2 * (k.nbytes + v.nbytes),  # read and written
                **summary(seconds[1:]),
                "bytes_per_second": 2 * (k.nbytes + v.nbytes) / median(seconds[1:]),
                "pool_bytes": sum(array.nbytes for array in pool.arrays),
                # Near the pool's size: it is copied.
                "temporary_bytes": memory.temp_size_in_bytes if memory else None,
            }
            part.put(write=[*part.result["write"], row])
            part.note(f"a write of {rows} rows, block size {block_size}: {row['median_us']:.1f} us")
        except Exception as error:
            part.fail(f"a write of {rows} rows, block size {block_size}: {one_line(error)}")
