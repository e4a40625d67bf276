"""Clocks, a copy to compare with, and random memory to read."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.paged_attention import KVPool


def summary(seconds: list[float]) -> dict[str, float]:
    """Microseconds: the median, and how far the calls were apart."""
    return {"median_us": 1e6 * median(seconds), "min_us": 1e6 * min(seconds), "max_us": 1e6 * max(seconds)}


def seconds_of(call: Callable[[], Any], calls: int) -> list[float]:
    """Of each of `calls` calls, after one that is not counted."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds


def copy_bandwidth(num_bytes: int, copies: int, calls: int) -> dict[str, Any]:
    """Bytes read and written in a second by `copies` copies in a row, of the faster of two kinds."""
    data = jax.random.bits(jax.random.key(0), (num_bytes // 4,))
    found = {}
    for name, function in {"copy": jnp.copy, "elementwise": lambda x: x ^ jnp.uint32(1)}.items():
        compiled = jax.jit(function)

        def chain(compiled: Any = compiled) -> Array:
            x = data
            for _ in range(copies):
                x = compiled(x)
            return x

        found[name] = 2 * data.nbytes * copies / median(seconds_of(chain, calls))
    return {"bytes_per_second": max(found.values()), "bytes": data.nbytes, "by_kind": found}


def free_bytes() -> int:
    """Of the device's memory; a number that never limits where the device does not tell."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 1 << 62)) - int(stats.get("bytes_in_use", 0))


def random_pool(pool: KVPool, seed: int = 0) -> KVPool:
    """`pool`, which is consumed, filled with normal numbers, piece by piece: making them takes memory."""
    arrays = []
    for n, array in enumerate(pool.arrays):
        piece = max(1, (64 << 20) // array[0].nbytes)

        @partial(jax.jit, donate_argnums=0, static_argnums=3)
        def fill(array: Array, key: Array, start: int, length: int) -> Array:
            values = jax.random.normal(key, (length, *array.shape[1:]), array.dtype)
            return jax.lax.dynamic_update_slice_in_dim(array, values, start, axis=0)

        for start in range(0, len(array), piece):
            key = jax.random.fold_in(jax.random.key(seed + n), start)
            array = fill(array, key, start, min(piece, len(array) - start))
        arrays.append(array)
    return replace(pool, arrays=tuple(arrays))
