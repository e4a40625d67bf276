"""What a step of the compiled run loop launches around the model, by the TPU compiler. Needs no TPU.

    JAX_PLATFORMS=cpu python -m benchmarks.tpu_launches

Takes a few minutes. Writes benchmarks/results/tpu_launches.json and tpu_launches.md. The models have two layers, since
the count does not depend on them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.hlo import STEP_PARTS, Module, count_step
from benchmarks.loops import MODELS, Loop, engine_config
from benchmarks.tables import write_results

LAYERS = 2
PARTS = (*STEP_PARTS[:-1], "other")  # without the loop's condition
_NOTES = """A launch is a fusion, a sort, a copy or the like: what the compiler leaves as an operation of its own and
that is neither arithmetic on one number nor a transfer that runs beside. `forward` and `sample` have a
conditional each, whose branches are the buckets: those of `forward` are the model's; of `sample` the
widest one is counted, the head's product in it. Two conditionals release blocks, in the steps that have
some to release alone: what stands in them is counted apart."""


@dataclass(frozen=True)
class Row:
    """launches: of every step, by part and opcode. preempts, finishes: what such a step launches besides."""

    model: str
    chip: str
    launches: dict[str, dict[str, int]]
    preempts: dict[str, int]
    finishes: dict[str, int]

    @property
    def sums(self) -> dict[str, int]:
        return {part: sum(self.launches.get(part, {}).values()) for part in PARTS}

    @property
    def total(self) -> int:
        return sum(sum(counts.values()) for counts in self.launches.values())


def measure(model: str, chip: str) -> Row:
    loop = Loop.of(replace(MODELS[model], num_layers=LAYERS), engine_config(block_size=16))
    module = Module.parse(loop.compile(chip).text)
    launches = {part: dict(counts) for part, counts in count_step(module).items()}
    return Row(model, chip, launches, _releases(module, "allocate"), _releases(module, "commit"))


def _releases(module: Module, part: str) -> dict[str, int]:
    """What the conditional that releases blocks launches where it does."""
    (conditional,) = [
        instruction
        for instruction in module.instructions
        if instruction.opcode == "conditional" and {part, "release"} <= set(module.functions(instruction))
    ]
    branches = [list(module.launches(branch)) for branch in conditional.branches]
    return dict(Counter(launch.opcode for launch in max(branches, key=len)))


def markdown(rows: Sequence[Row]) -> str:
    heads = ["model", "chip", *PARTS, "**sum**", "if it preempts", "if one finishes"]
    lines = [_NOTES, "", "| " + " | ".join(heads) + " |", "|---|---|" + "--:|" * (len(heads) - 2)]
    for row in rows:
        besides = (f"+ {sum(row.preempts.values())}", f"+ {sum(row.finishes.values())}")
        cells = [row.model, row.chip, *row.sums.values(), f"**{row.total}**", *besides]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    rows = []
    for model, chip in (("qwen3-0.6b", "v5e"), ("llama-3.1-8b", "v5e"), ("llama-3.1-8b", "v6e")):
        rows.append(row := measure(model, chip))
        print(f"{model} {chip}: {row.total}", flush=True)
        write_results("tpu_launches", [asdict(row) for row in rows], markdown(rows))


if __name__ == "__main__":
    main()
