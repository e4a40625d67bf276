"""What XLA's GPU compiler makes of the attention kernels at every named shape. Needs no GPU.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu_kernels [--chips H100,A100,L4,B200] [--shapes NAME,...]

Writes benchmarks/results/gpu_kernels.json and gpu_kernels.md. benchmarks/gpu_topology.py says what it needs. Fails
where a pool is copied, where float32 is rounded to 10 bits, and, after writing, where a kernel spills registers.
"""

import argparse
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_topology import CHIPS, GPUProgram, compile_for, versions
from kernels_pallas.paged_attention import KVPool, init_kv_pool, paged_attention, write_kv
from kernels_pallas.paged_attention.shapes import SHAPES, Shape

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Load:
    """Tiles of `tokens` tokens each, of sequences of up to `positions` positions."""

    tiles: int
    tokens: int
    positions: int
    block_size: int
    dtype: str

    def __str__(self) -> str:
        kind = "decode" if self.tokens == 1 else f"prefill, tiles of {self.tokens}"
        return f"{kind}, {self.tiles} tiles, {self.positions} positions, blocks of {self.block_size}, {self.dtype}"


LOADS = (
    Load(1, 1, 32768, 16, "bfloat16"),
    Load(64, 1, 4096, 16, "bfloat16"),
    Load(64, 1, 4096, 256, "bfloat16"),
    Load(16, 32, 4096, 16, "bfloat16"),
    Load(16, 32, 4096, 256, "bfloat16"),
    Load(8, 1, 4096, 16, "float32"),
    Load(16, 32, 4096, 16, "float32"),
)


def compile_layer(chip: str, shape: Shape, load: Load) -> GPUProgram:
    """`write_kv` of the tiles' tokens into a donated pool, then `paged_attention`, as a layer does it."""
    width = load.positions // load.block_size
    num_blocks = load.tiles * width
    pool = jax.eval_shape(
        lambda: init_kv_pool(num_blocks, load.block_size, shape.num_kv_heads, shape.head_dim, load.dtype, "gpu")
    )
    rows = load.tiles * load.tokens
    kv = jax.ShapeDtypeStruct((rows, shape.num_kv_heads, shape.head_dim), jnp.dtype(load.dtype))
    q = jax.ShapeDtypeStruct((load.tiles, load.tokens, shape.num_heads, shape.head_dim), jnp.dtype(load.dtype))
    sinks = jax.ShapeDtypeStruct((shape.num_heads,), jnp.float32) if shape.sinks else None

    def ints(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.int32)

    def layer(pool: KVPool, q: Any, k: Any, v: Any, block: Any, offset: Any, tables: Any, *lengths: Any) -> Any:
        first_position, num_tokens, sinks = lengths
        pool = write_kv(pool, k, v, block, offset)
        out = paged_attention(
            q,
            pool,
            tables,
            first_position,
            num_tokens,
            scale=shape.head_dim**-0.5,
            sliding_window=shape.sliding_window,
            logits_soft_cap=shape.logits_soft_cap,
            sinks=sinks,
        )
        return pool, out

    lengths = (ints(load.tiles), ints(load.tiles), sinks)
    return compile_for(
        chip, layer, pool, q, kv, kv, ints(rows), ints(rows), ints(load.tiles, width), *lengths, donate=(0,)
    )


def measure(chip: str, name: str, load: Load) -> list[dict[str, Any]]:
    """A row for each kernel. Raises RuntimeError if a pool is copied."""
    shape = SHAPES[name]
    program = compile_layer(chip, shape, load)
    pools = 2 * shape.num_kv_heads * shape.head_dim * jnp.dtype(load.dtype).itemsize
    pools *= load.tiles * load.positions + load.block_size
    # The partial results are the only temporaries that may be large.
    kernels = [kernel for kernel in program.kernels if kernel.name.startswith("paged_attention")]
    partial = kernels[0].grid[2] * load.tiles * load.tokens * shape.num_heads * (shape.head_dim + 2) * 4
    if program.sizes.alias_size_in_bytes < pools or program.sizes.temp_size_in_bytes > 1.2 * partial + 2**20:
        raise RuntimeError(f"{chip} {name} {load}: a pool is copied: {program.sizes}")
    rows = []
    for kernel in kernels:
        if load.dtype == "float32" and "tf32" in kernel.ptx:
            raise RuntimeError(f"{chip} {name} {load}: {kernel.name} rounds float32")
        rows.append(
            {
                "chip": chip,
                "shape": name,
                "load": str(load),
                "kernel": kernel.name,
                "grid": list(kernel.grid),
                "threads": kernel.threads,
                "shared_memory": kernel.shared_memory,
                "registers": kernel.registers,
                "spilled_bytes": kernel.spilled_bytes,
                "instruction": kernel.instruction,
                "programs_per_multiprocessor": resident(chip, kernel.threads, kernel.shared_memory, kernel.registers),
                "temp_bytes": program.sizes.temp_size_in_bytes,
                "compile_seconds": round(program.compile_seconds, 2),
            }
        )
    return rows


def resident(chip: str, threads: int, shared_memory: int, registers: int) -> int:
    """Programs that a multiprocessor holds at once: 64 K registers, given in eights, and 1 KB of shared memory more for
    each program."""
    by_registers = 65536 // (threads * -(-registers // 8) * 8)
    return min(by_registers, CHIPS[chip].shared_memory[0] // (shared_memory + 1024), 2048 // threads, 32)


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# The GPU kernels, compiled",
        "",
        "By `python -m benchmarks.gpu_kernels`, with XLA's GPU compiler and no GPU: sizes are exact, nothing is timed.",
        "Every pool is written in place. Spilled: bytes of registers. At once: programs that one multiprocessor holds.",
        "",
        ", ".join(f"{name} {version}" for name, version in versions().items()),
        "",
    ]
    for load in dict.fromkeys(row["load"] for row in rows):
        lines += [f"## {load}", ""]
        lines += [
            "| shape | chip | kernel | grid | threads | shared KB | registers | spilled | multiplies with | at once |"
        ]
        lines += ["|---|---|---|---|--:|--:|--:|--:|---|--:|"]
        for row in rows:
            if row["load"] == load:
                lines.append(
                    f"| {row['shape']} | {row['chip']} | {row['kernel'].removeprefix('paged_')} | "
                    f"{' x '.join(map(str, row['grid']))} | {row['threads']} | {row['shared_memory'] / 1024:.1f} | "
                    f"{row['registers']} | {row['spilled_bytes']} | {row['instruction']} | "
                    f"{row['programs_per_multiprocessor']} |"
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
    rows = []
    for load in LOADS:
        for name in args.shapes.split(","):
            for chip in args.chips.split(","):
                rows += measure(chip, name, load)
                print(chip, name, load, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu_kernels.json").write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
    (RESULTS / "gpu_kernels.md").write_text(markdown(rows))
    spilling = [row for row in rows if row["spilled_bytes"]]
    if spilling:
        raise SystemExit(f"kernels that spill: {spilling}")


if __name__ == "__main__":
    main()
