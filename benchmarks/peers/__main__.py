"""`python -m benchmarks.peers`: the standing workload on other engines, by turns with ours. See README.md."""

import argparse
import json
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import checkpoints
from benchmarks.peers.export import export
from benchmarks.peers.peers import BASELINE, PEERS, REPOSITORY, Peer, command, environment, environments, python
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.report import markdown, results
from benchmarks.peers.rounds import Load, measure
from jaxpaged.bench import workloads
from jaxpaged.bench.results import machine
from jaxpaged.generate import DEFAULT_MODEL

DEFAULT = [name for name in PEERS if name != "ours-bf16"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m benchmarks.peers",
        description="Measure the standing workload on other engines, by turns with ours. The table goes to standard "
        "output, all else to standard error.",
        allow_abbrev=False,
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=DEFAULT, metavar="PEER", help=" ".join(PEERS))
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds (%(default)s)")
    parser.add_argument(
        "--requests",
        nargs="+",
        default=[],
        metavar="[PEER=]N",
        help="only the first N requests of the workload, for all or for a slow peer; ours is then measured with both",
    )
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="seconds to wait for one answer (%(default)g)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to FILE, too")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, not {args.repeats}")
    for path in filter(None, [args.json, args.markdown]):
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}")
    chosen = [PEERS[name] for name in dict.fromkeys([BASELINE, *args.peers])]
    gguf = checkpoints.resolve(DEFAULT_MODEL)
    workload = workloads.draw(workloads.DEFINITIONS["throughput"], checkpoints.read_config(gguf).vocab_size)
    requests = _requests(args.requests, [peer.name for peer in chosen], len(workload.requests))
    missing = {
        peer.name: f"not installed: benchmarks/peers/setup.sh {peer.environment} makes its environment"
        for peer in chosen
        if not python(peer).exists()
    }
    load = Load(
        [len(request.prompt_token_ids) for request in workload.requests],
        [request.max_tokens for request in workload.requests],
    )
    models = {"gguf": gguf, "folder": _exported(gguf)}
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "workload.json"
        workloads.write(workload, file)

        def start(peer: Peer) -> PeerProcess:
            log = Path(temporary) / f"{peer.name}.log"
            line = command(peer, file, models[peer.weights])
            return PeerProcess(line, environment(peer), REPOSITORY, log, args.timeout)

        starts = {peer.name: partial(start, peer) for peer in chosen if peer.name not in missing}
        measured = measure(starts, requests, load, args.repeats, _say)
    found: dict[str, Any] = {
        "format": 1,
        "workload": workloads.describe(workload.definition)
        | {"prompt_tokens": workload.prompt_tokens, "output_tokens": workload.output_tokens},
        "model": f"{gguf.stem}, dequantized once but where the dtype says otherwise",
        "machine": machine(),
        "repeats": args.repeats,
        **results(measured, missing, load),
    }
    table = markdown(found)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _requests(given: list[str], names: list[str], most: int) -> dict[str, int]:
    """How many requests each peer gets. A later argument overrides an earlier one."""
    requests = dict.fromkeys(names, most)
    for text in given:
        name, _, number = text.rpartition("=")
        if not number.isdecimal() or not 1 <= int(number) <= most:
            raise ValueError(f"--requests takes N or PEER=N, with N from 1 to {most}, not {text!r}")
        if name and name not in requests:
            raise ValueError(f"--requests: {name!r} is none of the peers that are measured: {', '.join(names)}")
        requests |= {name: int(number)} if name else dict.fromkeys(names, int(number))
    return requests


def _exported(gguf: Path) -> Path:
    folder = environments() / "models" / gguf.stem
    if not (folder / "config.json").exists():
        _say(f"exporting the dequantized weights to {folder}")
        export(gguf, folder)
    return folder


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, it ends the peers, too
    sys.exit(main())
