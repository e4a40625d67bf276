"""What the TPU compiler makes of the attention kernel at every named shape. Needs no TPU.

    JAX_PLATFORMS=cpu python -m benchmarks.tpu_kernels [--chips v5e,v6e,v5p] [--shapes NAME,...] [--dtypes ...]

Writes benchmarks/results/tpu_kernels.json and tpu_kernels.md. docs/tpu.md explains the columns.
"""

import argparse
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from benchmarks.hlo import Module
from benchmarks.tables import write_results
from benchmarks.topology import CHIPS, Program, compile_for, num_bytes
from kernels_pallas.paged_attention import KVPool, init_kv_pool, paged_attention, write_kv
from kernels_pallas.paged_attention.shapes import SHAPES, Shape


@dataclass(frozen=True)
class Load:
    """Tiles of `rows` queries at the end of `context` positions, each of a sequence of its own."""

    tiles: int
    rows: int
    context: int
    block_size: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        kind = "decode" if self.rows == 1 else f"prefill of {self.rows}"
        return f"{kind}, batch {self.tiles}, context {self.context}"

    @property
    def table_width(self) -> int:
        return self.context // self.block_size


LOADS = (
    Load(64, 1, 4096, 256),
    Load(64, 1, 4096, 16),
    Load(64, 1, 512, 256),
    Load(1, 1, 32768, 256),
    Load(16, 32, 4096, 256),
)
# float32 pools serve tests and small models; two shapes, one of each kind of head group, are enough.
FLOAT32_SHAPES = ("llama-3.1-8b", "gpt-oss-20b")


# The goal for decode: bytes of the whole program against the ideal ones.
MOST_OF_IDEAL = 1.1


@dataclass(frozen=True)
class Row:
    """One compile. vmem_bytes: what the kernel holds.

    ideal_bytes: what has to move. kernel_bytes: what the kernel moves at this context: the blocks that its tiles see,
    and its other operands and its result as they are, padded heads and tiles included. around_bytes: of the operations
    around it, as the compiler counts. declared_bytes: what the kernel tells the compiler, for the longest context and
    the worst place of a window; None where it tells nothing.
    """

    chip: str
    shape: str
    load: Load
    compile_seconds: float
    vmem_bytes: int
    ideal_bytes: int
    kernel_bytes: int
    around_bytes: int
    declared_bytes: int | None

    @property
    def ratio(self) -> float:
        return (self.kernel_bytes + self.around_bytes) / self.ideal_bytes

    @property
    def misses_the_goal(self) -> bool:
        return self.load.rows == 1 and self.ratio > MOST_OF_IDEAL


def seen_bytes(shape: Shape, load: Load) -> int:
    """Keys and values of each block that a tile sees, once."""
    first_query = load.context - load.rows
    first_key = 0 if shape.sliding_window is None else max(0, first_query - shape.sliding_window + 1)
    blocks = load.table_width - first_key // load.block_size
    row_bytes = 2 * shape.num_kv_heads * shape.head_dim * jnp.dtype(load.dtype).itemsize
    return load.tiles * blocks * load.block_size * row_bytes


def ideal_bytes(shape: Shape, load: Load) -> int:
    """Besides, queries and results once."""
    query_bytes = load.rows * shape.num_heads * shape.head_dim * jnp.dtype(load.dtype).itemsize
    return seen_bytes(shape, load) + 2 * load.tiles * query_bytes


def pool_shape(shape: Shape, load: Load) -> KVPool:
    return jax.eval_shape(
        lambda: init_kv_pool(
            load.tiles * load.table_width, load.block_size, shape.num_kv_heads, shape.head_dim, load.dtype, "tpu"
        )
    )


def _abstract_tiles(shape: Shape, load: Load) -> tuple[jax.ShapeDtypeStruct, ...]:
    def ints(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.int32)

    q = jax.ShapeDtypeStruct((load.tiles, load.rows, shape.num_heads, shape.head_dim), jnp.dtype(load.dtype))
    sinks = jax.ShapeDtypeStruct((shape.num_heads,), jnp.float32)
    return q, ints(load.tiles, load.table_width), ints(load.tiles), ints(load.tiles), sinks


def compile_attention(chip: str, shape: Shape, load: Load) -> Program:
    """`paged_attention` alone."""

    def attend(
        pool: KVPool,
        q: Float[Array, "N Q H D"],
        block_tables: Int[Array, "N M"],
        first_position: Int[Array, " N"],
        num_tokens: Int[Array, " N"],
        sinks: Float[Array, " H"],
    ) -> Float[Array, "N Q H D"]:
        return _attend(shape, pool, q, block_tables, first_position, num_tokens, sinks)

    return compile_for(chip, attend, pool_shape(shape, load), *_abstract_tiles(shape, load))


def compile_write_and_attention(chip: str, shape: Shape, load: Load) -> Program:
    """`write_kv` of the tiles' rows into a donated pool, then `paged_attention`, as a layer does it."""

    def layer(
        pool: KVPool,
        q: Float[Array, "N Q H D"],
        block_tables: Int[Array, "N M"],
        first_position: Int[Array, " N"],
        num_tokens: Int[Array, " N"],
        sinks: Float[Array, " H"],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
    ) -> tuple[KVPool, Float[Array, "N Q H D"]]:
        position = (first_position[:, None] + jnp.arange(load.rows)).reshape(-1)
        tile = jnp.repeat(jnp.arange(load.tiles), load.rows)
        block = block_tables[tile, position // load.block_size]
        pool = write_kv(pool, k, v, block, position % load.block_size)
        return pool, _attend(shape, pool, q, block_tables, first_position, num_tokens, sinks)

    kv = jax.ShapeDtypeStruct((load.tiles * load.rows, shape.num_kv_heads, shape.head_dim), jnp.dtype(load.dtype))
    return compile_for(chip, layer, pool_shape(shape, load), *_abstract_tiles(shape, load), kv, kv, donate=(0,))


def _attend(
    shape: Shape, pool: KVPool, q: Array, block_tables: Array, first_position: Array, num_tokens: Array, sinks: Array
) -> Array:
    return paged_attention(
        q,
        pool,
        block_tables,
        first_position,
        num_tokens,
        scale=shape.head_dim**-0.5,
        sliding_window=shape.sliding_window,
        logits_soft_cap=shape.logits_soft_cap,
        sinks=sinks if shape.sinks else None,
    )


@dataclass(frozen=True)
class Refusal:
    """What the compiler said instead of compiling."""

    chip: str
    shape: str
    load: Load
    error: str


def measure(chip: str, name: str, load: Load) -> Row | Refusal:
    try:
        program = compile_attention(chip, SHAPES[name], load)
    except jax.errors.JaxRuntimeError as error:
        # In the middle of its message stands the whole kernel's line.
        reason = re.search(r"Scoped allocation with .*? scoped vmem limit", str(error))
        return Refusal(chip, name, load, reason[0] if reason else " ".join(str(error).split())[:200])
    (kernel,) = Module.parse(program.text).kernels
    operands = kernel.operand_bytes
    operands.remove(num_bytes(pool_shape(SHAPES[name], load)))
    # For a kernel that declares nothing the compiler counts whole operands and results.
    counted = kernel.declared_bytes or sum(kernel.operand_bytes) + kernel.result_bytes
    return Row(
        chip=chip,
        shape=name,
        load=load,
        compile_seconds=round(program.trace_seconds + program.compile_seconds, 2),
        vmem_bytes=kernel.vmem_bytes,
        ideal_bytes=ideal_bytes(SHAPES[name], load),
        kernel_bytes=seen_bytes(SHAPES[name], load) + sum(operands) + kernel.result_bytes,
        around_bytes=program.bytes_accessed - counted,
        declared_bytes=kernel.declared_bytes,
    )


def markdown(rows: Iterable[Row | Refusal]) -> str:
    """A table for each load and dtype, a line for each shape and chip. Bold: a decode that misses the goal."""
    loads: dict[Load, list[Row | Refusal]] = {}
    for row in rows:
        loads.setdefault(row.load, []).append(row)
    lines: list[str] = []
    for load, group in loads.items():
        lines += [f"### {load}, blocks of {load.block_size}, {load.dtype}", ""]
        lines += ["| shape | chip | compile s | VMEM MB | ideal MB | kernel | around it | sum | declared |"]
        lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|"]
        for row in group:
            if isinstance(row, Refusal):
                lines.append(f"| {row.shape} | {row.chip} | does not compile: {row.error} |||||||")
                continue
            kernel, around = row.kernel_bytes / row.ideal_bytes, row.around_bytes / row.ideal_bytes
            declared = "nothing" if row.declared_bytes is None else f"{row.declared_bytes / row.ideal_bytes:.3f}"
            ratio = f"**{row.ratio:.3f}**" if row.misses_the_goal else f"{row.ratio:.3f}"
            lines.append(
                f"| {row.shape} | {row.chip} | {row.compile_seconds:.1f} | {row.vmem_bytes / 2**20:.2f} | "
                f"{row.ideal_bytes / 1e6:.2f} | {kernel:.3f} | {around:.3f} | {ratio} | {declared} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(CHIPS), help="default: %(default)s")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--print", action="store_true", help="print the table and write no file")
    args = parser.parse_args()
    rows: list[Row | Refusal] = []
    for load in [*LOADS, Load(64, 1, 4096, 256, "float32")]:
        for name in args.shapes.split(","):
            if load.dtype == "float32" and name not in FLOAT32_SHAPES:
                continue
            for chip in args.chips.split(","):
                rows.append(row := measure(chip, name, load))
                said = row.error if isinstance(row, Refusal) else f"{row.ratio:.3f} of the ideal bytes"
                print(f"{name} {chip} {load}, blocks of {load.block_size}: {said}", flush=True)
    if args.print:
        print(markdown(rows))
    else:
        write_results("tpu_kernels", [asdict(row) for row in rows], markdown(rows))
    if any(isinstance(row, Refusal) for row in rows):
        parser.exit(1, "the compiler refused some of these\n")


if __name__ == "__main__":
    main()
