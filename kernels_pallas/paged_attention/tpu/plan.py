"""Tile sizes of the TPU kernel, by chip and shape.

A turn reads as many whole blocks as keep HBM busy: while a turn computes, the next one's copies are in flight, and by
Little's law these must be bandwidth x latency bytes. Bandwidth is the chip's, from jax's own table (v5e 820 GB/s, v6e
1,640 GB/s, v5p 1,230 GB/s for each of two cores). The latency, 2 us with the start of the copies, is an assumption: it
has not been measured for lack of a TPU.

Turns are whole multiples of 128 positions, the lanes of a register, in which the logits lie. A kernel has 16 MiB of
VMEM by default: a buffer takes 4 of them at most, and the logits of one head group half of one, since softmax makes a
few more arrays of their size. That bounds the turns of wide prefill tiles, which live on products and not on bytes.
"""

import numpy as np
from jax.experimental.pallas import tpu as pltpu

_LATENCY_SECONDS = 2e-6
_LANES = 128
_MOST_BUFFER_BYTES = 4 * 2**20
_MOST_LOGITS_BYTES = 2**19


def blocks_per_turn(block_size: int, lanes: int, dtype: np.dtype, rows: int) -> int:
    """How many blocks of `[block_size, lanes]` a turn reads for `rows` rows of a head group.

    128 positions at least, and a whole block.
    """
    chip = _chip()
    in_flight = chip.mem_bw_bytes_per_second * _LATENCY_SECONDS
    granule = max(block_size, _LANES)  # positions
    granule_bytes = granule * lanes * dtype.itemsize
    granules = round(min(in_flight, _MOST_BUFFER_BYTES) / granule_bytes)
    granules = max(1, min(granules, _MOST_LOGITS_BYTES // (4 * rows * granule)))
    return -(-granules * granule // block_size)


def num_cores() -> int:
    """Cores that share a kernel's grid: two where the chip shows them as one device (v4, v5p)."""
    return _chip().num_cores


def _chip() -> pltpu.TpuInfo:
    """The chip that the program is compiled for; where there is none, in the interpreter, a v5e."""
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)
