"""`python -m jaxpaged.bench`: measure a workload. `workloads.py`, `floors.py` and `probe.py` say what that means."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax

from jaxpaged.bench import workloads
from jaxpaged.bench.compare import compare, read
from jaxpaged.bench.compiles import CompileCounter
from jaxpaged.bench.report import explain_buckets, report
from jaxpaged.compilation_cache import use_compilation_cache
from jaxpaged.engine.config import DType, Policy
from jaxpaged.generate import DEFAULT_MODEL


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m jaxpaged.bench",
        description="Measure the engine, and beside it what this machine could do at most. Figures go to standard "
        "output, all else to standard error. The exit status is 1 if anything compiled after the warm-up.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "workload", nargs="?", choices=workloads.NAMES, default="throughput", help="what to serve (%(default)s)"
    )
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"), help="two files of --json: print B beside A, and be done"
    )

    load = parser.add_argument_group("workload", "Lengths are a number of tokens, or a range of them like 32-256.")
    load.add_argument("--nano", action="store_true", help="throughput as nano-vllm measures it: 256 long requests")
    load.add_argument("--requests", type=int, metavar="N")
    load.add_argument("--prompt-len", type=_range, metavar="N[-M]")
    load.add_argument("--output-len", type=_range, metavar="N[-M]")
    load.add_argument("--prefix-len", type=int, metavar="N", help="token ids that all prompts begin with")
    load.add_argument("--rate", type=float, metavar="R", help="requests a second that come, in serve-like")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload (%(default)s)")
    load.add_argument(
        "--write-workload",
        type=Path,
        metavar="FILE",
        help="write its token ids and lengths, for other engines, and be done",
    )

    engine = parser.add_argument_group("engine", "What is not given is as in jaxpaged.LLM.")
    engine.add_argument("--model", default=DEFAULT_MODEL, help="a folder, .gguf file or packaged model (%(default)s)")
    engine.add_argument("--dtype", choices=get_args(DType))
    engine.add_argument("--schedule", choices=get_args(Policy))
    engine.add_argument("--attention-implementation", metavar="NAME")
    for flag in _SIZES:
        engine.add_argument(f"--{flag.replace('_', '-')}", type=int, metavar="N")

    measure = parser.add_argument_group("measuring")
    measure.add_argument("--repeats", type=int, default=3, metavar="N", help="of the workload (%(default)s)")
    measure.add_argument("--trace", action="store_true", help="also with the trace on, by turns: what it costs")
    measure.add_argument("--stream", action="store_true", help="also read along, by turns: what it costs")
    measure.add_argument("--no-floors", action="store_true", help="measure the workload alone")
    measure.add_argument("--explain-buckets", action="store_true", help="the compiled shapes, and what they padded")
    measure.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    return parser


_SIZES = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_waiting",
    "max_num_batched_tokens",
    "max_model_len",
    "max_steps",
)


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, NotImplementedError, OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    if args.compare:
        print(compare(*map(read, args.compare)))
        return 0
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, not {args.repeats}")
    definition = _definition(args)
    if args.write_workload:
        _write_workload(definition, args)
        return 0
    for path in filter(None, [args.json]):
        if not path.parent.is_dir():
            raise ValueError(f"--json: there is no folder {path.parent}")
    use_compilation_cache()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Only here, since it takes seconds.
    from jaxpaged.bench.session import Options, load, run_session

    with CompileCounter() as counter:
        llm, loaded = load(counter, args.model, _settings(args))
        workload = workloads.draw(definition, llm.engine.model_config.vocab_size)
        options = Options(args.repeats, trace=args.trace, stream=args.stream, floors=not args.no_floors)
        found = run_session(llm, workload, options, counter, loaded)
    print(report(found))
    if args.explain_buckets:
        print(explain_buckets(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    compiled = found["compiles_after_warm_up"]["programs"]
    if compiled:
        print(f"error: {compiled} programs were compiled after the warm-up", file=sys.stderr)
    return int(compiled > 0)


def _definition(args: argparse.Namespace) -> workloads.Definition:
    if args.nano and args.workload != "throughput":
        raise ValueError(f"--nano is a kind of throughput, not of {args.workload}")
    definition = workloads.NANO if args.nano else workloads.DEFINITIONS[args.workload]
    if args.rate is not None and definition.rate is None:
        raise ValueError(f"--rate is of serve-like; in {args.workload} all requests come at once")
    given = {
        "requests": args.requests,
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "shared_prefix": args.prefix_len,
        "rate": args.rate,
        "seed": args.seed,
    }
    return replace(definition, **{name: value for name, value in given.items() if value is not None})


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = (*_SIZES, "dtype", "schedule", "attention_implementation")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _write_workload(definition: workloads.Definition, args: argparse.Namespace) -> None:
    import checkpoints

    vocab_size = checkpoints.read_config(checkpoints.resolve(args.model)).vocab_size
    workloads.write(workloads.draw(definition, vocab_size), args.write_workload)


def _range(text: str) -> workloads.Range:
    fewest, _, most = text.partition("-")
    if not fewest.isdecimal() or (most and not most.isdecimal()) or text.endswith("-"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor a range like 32-256")
    return int(fewest), int(most or fewest)


if __name__ == "__main__":
    sys.exit(main())
