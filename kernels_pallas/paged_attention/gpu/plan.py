"""How the work is cut: tile sizes, and the parts of a context."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

# An H100's or H200's. An A100 has 108, a B200 148: the number of parts need not follow so small a difference.
NUM_MULTIPROCESSORS = 132
# Two or three decode programs fit a multiprocessor at once; some more even out contexts of different length.
PROGRAMS_PER_MULTIPROCESSOR = 4
# The merging kernel holds all parts of a row in registers: 64 of head_dim 256 in float32 are a quarter of them.
MOST_PARTS = 64


@dataclass(frozen=True)
class TileSizes:
    """rows: of one program, a power of two from 16 on, the fewest that a tensor core multiplies.
    positions: read in one turn of its loop. num_stages: one more than the turns that are read ahead."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int

    @property
    def smallest_part(self) -> int:
        """Positions. A partial result of R rows, written and read in float32, is as many bytes as 2 R positions in
        bfloat16; so it adds a quarter at most."""
        return 8 * self.rows


# By padded head_dim and bytes of an element. Chosen from what XLA's GPU compiler makes of them for H100, A100, L4 and
# B200 (benchmarks/gpu_kernels.py): no register is spilled, and shared memory is below an L4's 99 KB. Not yet measured.
#
# Decode lives on bytes under way: 4.8 TB/s times a latency of some 0.8 us are 4 MB, 30 KB for each of 132
# multiprocessors. A turn reads 32 KB, two are under way in each program (70 KB), and three programs fit a
# Hopper multiprocessor's 227 KB. Twice the warps where four would spill: at head_dim 256 with a soft cap, and in
# float32, which is multiplied without tensor cores and holds both operands in registers.
_DECODE = {
    (64, 2): TileSizes(rows=16, positions=128, num_warps=4, num_stages=3),
    (128, 2): TileSizes(rows=16, positions=64, num_warps=4, num_stages=3),
    (256, 2): TileSizes(rows=16, positions=32, num_warps=8, num_stages=3),
    (64, 4): TileSizes(rows=16, positions=64, num_warps=8, num_stages=3),
    (128, 4): TileSizes(rows=16, positions=32, num_warps=8, num_stages=3),
    (256, 4): TileSizes(rows=16, positions=16, num_warps=8, num_stages=3),
}
# Prefill lives on products: 64 rows are the fewest of Hopper's wgmma. Queries, weights and one turn read ahead take
# 56-97 KB, so two programs fit and one multiplies while the other waits. In float32 32 rows spill from head_dim 96 on.
_PREFILL = {
    (64, 2): TileSizes(rows=64, positions=64, num_warps=4, num_stages=3),
    (128, 2): TileSizes(rows=64, positions=64, num_warps=4, num_stages=2),
    (256, 2): TileSizes(rows=64, positions=32, num_warps=8, num_stages=2),
    (64, 4): TileSizes(rows=32, positions=32, num_warps=4, num_stages=2),
    (128, 4): TileSizes(rows=16, positions=32, num_warps=8, num_stages=3),
    (256, 4): TileSizes(rows=16, positions=16, num_warps=8, num_stages=3),
}


def tile_sizes(num_rows: int, head_dim: int, dtype: np.dtype) -> TileSizes:
    """For tiles of `num_rows` rows, a row being one query head of one token; `dtype` is what is multiplied."""
    key = (pl.next_power_of_2(head_dim), dtype.itemsize)
    if num_rows <= _DECODE[key].rows:
        return _DECODE[key]
    sizes = _PREFILL[key]
    return replace(sizes, rows=min(sizes.rows, pl.next_power_of_2(num_rows)))


def num_parts(num_programs: int, most_positions: int, sizes: TileSizes) -> int:
    """In how many parts to cut each context, where `num_programs` programs would take one part each."""
    wanted = pl.cdiv(PROGRAMS_PER_MULTIPROCESSOR * NUM_MULTIPROCESSORS, num_programs)
    return max(1, min(wanted, pl.cdiv(most_positions, sizes.smallest_part), MOST_PARTS))


def part_bounds(
    begin: Int[Array, ""], end: Int[Array, ""], part: Int[Array, ""], parts: int, sizes: TileSizes
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """First position and end of one of the `parts` of the positions from `begin` to `end`. An empty one ends where it
    begins, or before; all after it are empty too. Parts are equal, and whole turns, but for the last one."""
    size = pl.cdiv(pl.cdiv(end - begin, parts), sizes.positions) * sizes.positions
    size = jnp.maximum(size, sizes.smallest_part)
    part_begin = begin + part * size
    return part_begin, jnp.minimum(part_begin + size, end)
