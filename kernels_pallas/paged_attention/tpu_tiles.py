"""Tile sizes of the TPU kernel, by chip and shape."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

_LATENCY_SECONDS = 2e-6
_VMEM_SHARE = 4 * 2**20


def _chip() -> pltpu.TpuInfo:
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)


def num_cores() -> int:
    return _chip().num_cores


def blocks_per_turn(pool_shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    _, block_size, lanes = pool_shape
    block_bytes = block_size * lanes * dtype.itemsize
    wanted = int(_chip().mem_bw_bytes_per_second * _LATENCY_SECONDS)
    return max(1, min(wanted, _VMEM_SHARE) // block_bytes)
