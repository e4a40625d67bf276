"""What a step of the compiled run loop launches around the model, by the TPU compiler. Needs no TPU.

    JAX_PLATFORMS=cpu python -m benchmarks.tpu_launches

Takes a few minutes. Writes benchmarks/results/tpu_launches.json and tpu_launches.md. The models have two layers, since
the count does not depend on them.
"""

from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, replace

from benchmarks.hlo import STEP_PARTS, Module, count_step
from benchmarks.loops import MODELS, Loop, engine_config
from benchmarks.tables import write_results

LAYERS = 2
PARTS = (*STEP_PARTS[:-1], "other")  # without the loop's condition
_NOTES = """A launch is a fusion, a sort, a copy or the like: what the compiler leaves as an operation of its own and
that is neither arithmetic on one number nor a transfer that runs beside. `forward` and `sample` have a
conditional each, whose branches are the buckets: those of `forward` are the model's; of `sample` the
widest one is counted, the head's product in it. What only some steps do stands in conditionals and is
counted apart: a look into the prefix cache if somebody waits or may be preempted; blocks and slots if any
change hands; releases if it preempts, or one finishes; an entry in the prefix cache if a block gets full."""


@dataclass(frozen=True)
class Row:
    """launches: of every step, by part and opcode. besides: those of a step that does what the name says."""

    model: str
    chip: str
    launches: dict[str, dict[str, int]]
    besides: dict[str, int]

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
    besides = {name: _inside(module, *functions) for name, functions in _BESIDES.items()}
    return Row(model, chip, launches, besides)


# Each conditional by the functions that it stands in, and by those that it does not.
_BESIDES: dict[str, tuple[set[str], ...]] = {
    "one waits": ({"_sharing"},),
    "blocks change": ({"allocate"}, {"_change"}),
    "it preempts": ({"_change", "release"},),
    "a block is full": ({"_register"},),
    "one finishes": ({"commit", "release"},),
}


def _inside(module: Module, stands_in: set[str], but_not: Set[str] = frozenset()) -> int:
    """What the branch of a conditional launches that does something."""
    (conditional,) = [
        instruction
        for instruction in module.instructions
        if instruction.opcode == "conditional"
        and stands_in <= set(module.functions(instruction))
        and not but_not & set(module.functions(instruction))
    ]
    return max(len(list(module.launches(branch))) for branch in conditional.branches)


def markdown(rows: Sequence[Row]) -> str:
    heads = ["model", "chip", *PARTS, "**sum**", *(f"if {name}" for name in _BESIDES)]
    lines = [_NOTES, "", "| " + " | ".join(heads) + " |", "|---|---|" + "--:|" * (len(heads) - 2)]
    for row in rows:
        besides = [f"+ {count}" for count in row.besides.values()]
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
