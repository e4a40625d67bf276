"""What XLA's GPU compiler makes of the whole run loop of two real models. Needs no GPU, and allocates nothing.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu_loops [--chips H100] [--models NAME,...]

Writes benchmarks/results/gpu_loops.json and gpu_loops.md. benchmarks/gpu_topology.py says what it needs. Fails where a
pool is copied.
"""

import argparse
import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.gpu_topology import compile_for, versions
from benchmarks.loops import MODELS, Loop, engine_config
from benchmarks.topology import num_bytes
from jaxpaged.engine.run import compile_run

RESULTS = Path(__file__).parent / "results"
BLOCK_SIZE = 16


def measure(chip: str, name: str) -> dict[str, str | int | float]:
    loop = Loop.of(MODELS[name], engine_config(block_size=BLOCK_SIZE), "gpu")
    run = compile_run(loop.graphdef, loop.config)
    program = compile_for(chip, run, loop.params, loop.state, jax.ShapeDtypeStruct((), jnp.int32))
    pools, state = num_bytes(loop.state.kv), num_bytes(loop.state)
    temporaries, aliased = program.sizes.temp_size_in_bytes, program.sizes.alias_size_in_bytes
    if aliased < 0.99 * state or temporaries > pools / 20:
        raise RuntimeError(f"{chip} {name}: a pool is copied: {program.sizes}")
    return {
        "chip": chip,
        "model": name,
        "buckets": len(loop.config.buckets),
        "compile_seconds": round(program.compile_seconds, 1),
        "params_bytes": num_bytes(loop.params),
        "pool_bytes": pools,
        "state_bytes": state,
        "aliased_bytes": aliased,
        "temp_bytes": temporaries,
        "attention_kernels": sum(kernel.name.startswith("paged_attention") for kernel in program.kernels),
    }


def markdown(rows: list[dict[str, str | int | float]]) -> str:
    lines = [
        "# The run loop, compiled for GPUs",
        "",
        "By `python -m benchmarks.gpu_loops`, with XLA's GPU compiler and no GPU: 64 sequences of up to 4,096 tokens,",
        f"512 tokens a step, blocks of {BLOCK_SIZE}, bfloat16. Aliased: of the state, which the loop updates in place.",
        "",
        ", ".join(f"{name} {version}" for name, version in versions().items()),
        "",
        "| model | chip | buckets | compile s | parameters MB | pools MB | state MB | aliased MB | temporaries MB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        sizes = (row[f"{key}_bytes"] for key in ("params", "pool", "state", "aliased", "temp"))
        columns = " | ".join(f"{float(size) / 1e6:,.1f}" for size in sizes)
        lines.append(f"| {row['model']} | {row['chip']} | {row['buckets']} | {row['compile_seconds']} | {columns} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="H100")
    parser.add_argument("--models", default=",".join(MODELS))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
    rows = []
    for name in args.models.split(","):
        for chip in args.chips.split(","):
            rows.append(measure(chip, name))
            print(rows[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu_loops.json").write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
    (RESULTS / "gpu_loops.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
