"""What the TPU compiler makes of the whole run loop of two real models. Needs no TPU, and allocates nothing.

    JAX_PLATFORMS=cpu python -m benchmarks.tpu_loops

Takes half an hour on two cores. Writes benchmarks/results/tpu_loops.json and tpu_loops.md; docs/tpu.md explains
the columns.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import jax

from benchmarks.hlo import Module
from benchmarks.loops import MODELS, Loop, engine_config, one_bucket_each
from benchmarks.tables import write_results
from benchmarks.topology import Program, num_bytes
from jaxpaged.engine.config import EngineConfig

# By arithmetic one more than fit beside their pools in the 16 GB of a v5e: from here downwards until one compiles.
_LLAMA_LAYERS_ON_V5E = 21


@dataclass(frozen=True)
class Case:
    """What is compiled. buckets: how many the loop has. layers: fewer than the model's where it does not fit."""

    program: str
    chip: str
    model: str
    layers: int
    block_size: int
    buckets: list[str]


@dataclass(frozen=True)
class Row:
    """One compile. Bytes are of HBM. pool_bytes: of all layers. aliased_bytes: of the state, updated in place."""

    case: Case
    trace_seconds: float
    compile_seconds: float
    cpu_seconds: float
    params_bytes: int
    pool_bytes: int
    state_bytes: int
    aliased_bytes: int
    temp_bytes: int
    code_bytes: int
    kernels: int
    pool_copies: int


@dataclass(frozen=True)
class Refusal:
    """What the compiler said instead of compiling."""

    case: Case
    error: str


def measure(chip: str, name: str, layers: int, config: EngineConfig, program: str = "run") -> Row | Refusal:
    loop = Loop.of(replace(MODELS[name], num_layers=layers), config)
    buckets = [f"{b.rows} rows, {b.decode_tiles} + {b.prefill_tiles} tiles" for b in config.buckets]
    case = Case(program, chip, name, layers, config.block_size, buckets)
    try:
        compiled = loop.compile(chip) if program == "run" else loop.compile_step(chip)
    except jax.errors.JaxRuntimeError as error:
        reason = re.search(r"Ran out of memory.*?available HBM \(.*?\)", str(error))
        return Refusal(case, reason[0] if reason else " ".join(str(error).split())[:200])
    return _row(case, loop, compiled)


def _row(case: Case, loop: Loop, program: Program) -> Row:
    module, sizes = Module.parse(program.text), program.sizes
    return Row(
        case=case,
        trace_seconds=round(program.trace_seconds, 1),
        compile_seconds=round(program.compile_seconds, 1),
        cpu_seconds=round(program.cpu_seconds, 1),
        params_bytes=num_bytes(loop.params),
        pool_bytes=num_bytes(loop.state.kv),
        state_bytes=num_bytes(loop.state),
        aliased_bytes=sizes.alias_size_in_bytes,
        temp_bytes=sizes.temp_size_in_bytes,
        code_bytes=sizes.generated_code_size_in_bytes,
        kernels=len(module.kernels),
        pool_copies=len(module.copies(loop.state.kv[0].arrays[0])),
    )


def markdown(results: Sequence[Row | Refusal]) -> str:
    loops = [r for r in results if r.case.program == "run" and len(r.case.buckets) > 1]
    buckets = [r for r in results if r.case.program == "run" and len(r.case.buckets) == 1]
    steps = [r for r in results if r.case.program == "step"]
    lines = ["### The whole loop", "", *_table(loops, "buckets", lambda case: str(len(case.buckets)))]
    lines += ["", "### Loops of one bucket each", "", *_table(buckets, "bucket", lambda case: case.buckets[0])]
    lines += ["", "### One step alone", "", *_table(steps, "buckets", lambda case: str(len(case.buckets)))]
    return "\n".join(lines)


def _table(results: Sequence[Row | Refusal], column: str, of: Callable[[Case], str]) -> list[str]:
    lines = [
        f"| model | layers | chip | block | {column} | trace s | compile s | CPU s | params MB | pools MB | "
        "state aliased | temporaries MB | code MB | kernels | pool copies |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|",
    ]
    for row in results:
        case = row.case
        layers = f"{case.layers}" if case.layers == MODELS[case.model].num_layers else f"{case.layers}, not the whole"
        line = f"| {case.model} | {layers} | {case.chip} | {case.block_size} | {of(case)} | "
        if isinstance(row, Refusal):
            lines.append(line + f"does not compile: {row.error} ||||||||||")
            continue
        # Small buffers are padded to whole tiles, so what is aliased may be more than the state.
        aliased = "all" if row.aliased_bytes >= row.state_bytes else f"{row.aliased_bytes / 1e6:.1f} MB only"
        lines.append(
            line + f"{row.trace_seconds} | {row.compile_seconds} | {row.cpu_seconds} | {row.params_bytes / 1e6:.0f} | "
            f"{row.pool_bytes / 1e6:.0f} | {aliased} | {row.temp_bytes / 1e6:.1f} | {row.code_bytes / 1e6:.0f} | "
            f"{row.kernels} | {row.pool_copies} |"
        )
    return lines


def main() -> None:
    qwen, llama = MODELS["qwen3-0.6b"].num_layers, MODELS["llama-3.1-8b"].num_layers
    config = engine_config(block_size=16)
    plan: list[tuple[str, str, int, EngineConfig, str]] = [
        ("v5e", "qwen3-0.6b", qwen, config, "run"),
        ("v6e", "llama-3.1-8b", llama, config, "run"),
        ("v5e", "llama-3.1-8b", llama, config, "run"),
        *(("v5e", "llama-3.1-8b", layers, config, "run") for layers in range(_LLAMA_LAYERS_ON_V5E, 0, -1)),
        *(("v5e", "qwen3-0.6b", qwen, one, "run") for one in one_bucket_each(config)),
        ("v6e", "qwen3-0.6b", qwen, config, "run"),
        ("v5e", "qwen3-0.6b", qwen, engine_config(block_size=256), "run"),
        *(("v6e", "llama-3.1-8b", llama, one, "run") for one in one_bucket_each(config)),
        ("v5e", "qwen3-0.6b", qwen, config, "step"),
        ("v6e", "llama-3.1-8b", llama, config, "step"),
    ]
    results: list[Row | Refusal] = []
    compiled: set[tuple[str, str]] = set()
    for chip, name, layers, engine, program in plan:
        is_part = layers < MODELS[name].num_layers
        if is_part and (chip, name) in compiled:
            continue
        results.append(row := measure(chip, name, layers, engine, program))
        if isinstance(row, Row):
            compiled.add((chip, name))
        said = row.error if isinstance(row, Refusal) else f"{row.trace_seconds} + {row.compile_seconds} s"
        print(row.case, said, flush=True)
        # Written after each, since all take long.
        write_results("tpu_loops", [asdict(row) for row in results], markdown(results))


if __name__ == "__main__":
    main()
