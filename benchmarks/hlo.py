"""Read a compiled TPU program's text: its kernels, its copies, and how many operations a part of it launches."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import jax

_DTYPES = {"bfloat16": "bf16", "float32": "f32", "int32": "s32"}
_ITEMSIZE = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
# These take no time of their own: names, constants and views of memory.
_FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"})
# A scalar may still be the result of work on arrays.
_WHOLE = frozenset({"fusion", "reduce", "conditional", "while", "custom-call", "call", "sort"})
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_VMEM = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. type: of its result, with its layout. frame: its place in the source, if known."""

    name: str
    type: str
    opcode: str
    line: str
    frame: int | None

    @property
    def is_kernel(self) -> bool:
        return 'custom_call_target="tpu_custom_call"' in self.line

    @property
    def declared_bytes(self) -> int | None:
        """Bytes that a kernel declares to read and write (pl.CostEstimate); None where it declares nothing."""
        declared = re.search(r'"bytes_accessed":"?(\d+)', self.line)
        return int(declared[1]) if declared else None

    @property
    def operand_bytes(self) -> list[int]:
        """Of each operand of a kernel."""
        operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", self.line)
        return _array_bytes(operands[1]) if operands else []

    @property
    def result_bytes(self) -> int:
        return sum(_array_bytes(self.type))

    @property
    def is_transfer(self) -> bool:
        """A copy between memories that runs beside the computation, or the end of one."""
        return self.opcode.endswith(("-start", "-done")) or "ConcatBitcast" in self.line

    @property
    def is_scalar(self) -> bool:
        return "[]" in self.type and not self.type.startswith("(") and self.opcode not in _WHOLE

    @property
    def vmem_bytes(self) -> int:
        """VMEM that this operation holds while it runs, its own buffers and its double-buffered operands."""
        used = _VMEM.search(self.line)
        sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1] if used else "")
        return sum(map(int, sizes))

    @property
    def branches(self) -> list[str]:
        found = _BRANCHES.search(self.line)
        return re.findall(r"%([\w.-]+)", found[1]) if found else []

    @property
    def called(self) -> list[str]:
        """Computations that this one runs one after another, without the branches of a conditional."""
        return _CALLED.findall(self.line.split("metadata=")[0])


@dataclass(frozen=True)
class Module:
    """A program's computations by name, `entry` among them, and the functions that each frame is in."""

    computations: dict[str, list[Instruction]]
    entry: str
    frames: dict[int, list[str]] = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "Module":
        computations: dict[str, list[Instruction]] = {}
        entry, body = "", []
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line)
            if head:
                body = computations[head[2]] = []
                entry = head[2] if head[1] else entry
            elif line.startswith("  ") and " = " in line:
                body.append(_instruction(line))
        return cls(computations, entry, _frames(text))

    @property
    def instructions(self) -> Iterator[Instruction]:
        for body in self.computations.values():
            yield from body

    @cached_property
    def kernels(self) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.is_kernel]

    def copies(self, array: jax.ShapeDtypeStruct) -> list[str]:
        """Lines that copy or transpose a whole array of this shape and dtype."""
        shape = f"{_DTYPES[array.dtype.name]}[{','.join(map(str, array.shape))}]"
        return [
            instruction.line
            for instruction in self.instructions
            if instruction.opcode in ("copy", "copy-start", "transpose")
            and instruction.type.lstrip("(").startswith(shape)
        ]

    def functions(self, instruction: Instruction) -> list[str]:
        """The Python functions that an instruction was traced in, outermost first. Of a fusion: those of its root."""
        return [] if instruction.frame is None else self.frames.get(instruction.frame, [])

    def launches(self, computation: str) -> Iterator[Instruction]:
        """What one run of a computation launches: inner loops with one turn of theirs, and conditionals, unentered.

        Left out are transfers, which run beside, and arithmetic on one number, which the scalar unit does in passing.
        """
        for instruction in self.computations[computation]:
            if instruction.opcode in _FREE or instruction.is_transfer or instruction.is_scalar:
                continue
            yield instruction
            if instruction.opcode in ("while", "call"):
                for called in instruction.called:
                    yield from self.launches(called)

    def main_loop(self) -> Instruction:
        """The loop of the entry computation. Raises ValueError unless there is just one."""
        (loop,) = [i for i in self.computations[self.entry] if i.opcode == "while"]
        return loop


def _instruction(line: str) -> Instruction:
    name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
    end = _end_of_type(rest)
    opcode = re.match(r" ([\w-]+)\(", rest[end:])
    frame = re.search(r"stack_frame_id=(\d+)", rest)
    return Instruction(
        name.lstrip("%"), rest[:end], opcode[1] if opcode else "", rest, int(frame[1]) if frame else None
    )


def _array_bytes(types: str) -> list[int]:
    arrays = re.findall(rf"\b({'|'.join(_ITEMSIZE)})\[([\d,]*)\]", types)
    return [_ITEMSIZE[dtype] * math.prod(map(int, filter(None, shape.split(",")))) for dtype, shape in arrays]


def _end_of_type(rest: str) -> int:
    """Types have spaces only within the parentheses of a tuple."""
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if character == " " and depth == 0:
            return i
    return len(rest)


def _frames(text: str) -> dict[int, list[str]]:
    names = {int(i): name for i, name in re.findall(r'^(\d+) "(.*)"$', _section(text, "FunctionNames"), re.M)}
    function_of = {
        int(i): names[int(function)]
        for i, function in re.findall(r"^(\d+) \{.*function_name_id=(\d+)", _section(text, "FileLocations"), re.M)
    }
    found = re.findall(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _section(text, "StackFrames"), re.M
    )
    # A caller's id is written one too high, so that 1 stands for none.
    parents = {int(i): (int(location), int(parent or 1) - 1) for i, location, parent in found}

    def chain(frame: int) -> list[str]:
        if frame not in parents:
            return []
        location, parent = parents[frame]
        return [*chain(parent), function_of[location]]

    return {frame: chain(frame) for frame in parents}


def _section(text: str, title: str) -> str:
    found = re.search(rf"^{title}$(.*?)^$", text, re.M | re.S)
    return found[1] if found else ""


# The functions of a step, as `jaxpaged.engine.step` calls them; what stands in none of them has lost its origin.
STEP_PARTS = ("make_schedule", "allocate", "forward", "sample", "commit", "record", "run_loop.<locals>.goes_on")


def count_step(module: Module) -> dict[str, Counter[str]]:
    """What one step of the run loop launches around the model, as opcodes by part; "other" is of unknown origin.

    That is the loop's body without the branches of `forward`'s switch, and the widest branch of `sample`'s, where
    nobody has a temperature. The head's product is in there.
    """
    (body,) = re.findall(r"body=%([\w.-]+)", module.main_loop().line)
    launches = list(module.launches(body))
    for switch in [i for i in launches if i.opcode == "conditional" and "sample" in module.functions(i)]:
        launches += module.launches(switch.branches[-1])
    counts: dict[str, Counter[str]] = {}
    for instruction in launches:
        functions = module.functions(instruction)
        part = next((part for part in STEP_PARTS if part in functions), "other")
        counts.setdefault(part, Counter())[instruction.opcode] += 1
    return counts
