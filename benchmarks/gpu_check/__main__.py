"""`make gpu-check`: run every part on the GPU at hand, write one JSON file, print a summary.

The exit status is 1 if a check failed. A goal that is not met is no failure; the summary marks it.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.part import FAILED, NOT_RUN, PARTS, write_json
from benchmarks.gpu_check.report import summary

_NEEDED = ("jax", "flax", "numpy", "jaxtyping", "ml_dtypes")
_ROOT = Path(__file__).parents[2]
_CHILD = (sys.executable, "-m", "benchmarks.gpu_check.child")
_FEWEST_SECONDS = 15
_STANDARD_ERROR = 2
_GRACE_SECONDS = 20  # for what cannot be interrupted, as a compile


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="the JSON file (benchmarks/results/gpu-DEVICE.json)")
    parser.add_argument("--parts", default=",".join(list(PARTS)[1:]), help="which, with commas between (%(default)s)")
    parser.add_argument("--implementation", help="of the attention (gpu; gpu_interpret in a dry run)")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU, to see that everything runs; its figures say so"
    )
    return parser


def main(argv: Sequence[str] | None = None, child: Sequence[str] = _CHILD) -> int:
    """`child`: the command that runs one part."""
    args = build_parser().parse_args(argv)
    names = args.parts.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        return _refuse(f"no part is called {unknown[0]!r} (there are: {', '.join(list(PARTS)[1:])})")
    missing = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
    if missing:
        return _refuse(f"no module {missing} in {sys.executable}; make gpu-check PYTHON=... names another Python")
    if args.implementation is None:
        args.implementation = "gpu_interpret" if args.dry_run else "gpu"
    if args.out is not None and not args.out.resolve().parent.is_dir():
        return _refuse(f"--out {args.out}: there is no folder {args.out.resolve().parent}")
    report = _run_parts(args, ["device", *(name for name in PARTS if name in names and name != "device")], child)
    print(summary(report), flush=True)
    return 1 if report["failed"] else 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def _run_parts(args: argparse.Namespace, names: list[str], child: Sequence[str]) -> dict[str, Any]:
    """Each part has until a moment that its own time and that of those before it gives; so no time is lost."""
    report: dict[str, Any] = {
        "dry_run": args.dry_run,
        "device": None,
        "implementation": args.implementation,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git_commit(),
        "failed": [],
        "parts": {},
    }
    out = args.out
    start = time.monotonic()
    for name, end in zip(names, accumulate(PARTS[name] for name in names), strict=True):
        left = end - (time.monotonic() - start)
        result = (
            _run_part(name, left, args, child)
            if left >= _FEWEST_SECONDS
            else {"status": NOT_RUN, "complete": False, "failures": ["no time is left"]}
        )
        report["parts"][name] = result
        report["failed"] = [name for name, part in report["parts"].items() if part["status"] == FAILED]
        report["seconds"] = round(time.monotonic() - start, 1)
        if name == "device":
            report["device"] = "cpu" if args.dry_run else result.get("kind")
            out = out or _default_path(report)
        report["out"] = str(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, report)
        if name == "device" and report["failed"]:
            break
    return report


def _default_path(report: dict[str, Any]) -> Path:
    """A dry run's or a failed start's is not kept among the results."""
    if report["dry_run"] or report["failed"]:
        return Path(tempfile.gettempdir()) / "gpu-check.json"
    name = re.sub(r"[^a-z0-9]+", "-", str(report["device"]).lower()).strip("-")
    return _ROOT / "benchmarks" / "results" / f"gpu-{name}.json"


def _run_part(name: str, seconds: float, args: argparse.Namespace, child: Sequence[str]) -> dict[str, Any]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))}
    if args.dry_run:
        env["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [*child, name, "--result", str(path), "--seconds", f"{seconds:.1f}"]
        command += ["--implementation", args.implementation]
        if args.dry_run:
            command.append("--dry-run")
        process = subprocess.Popen(command, env=env, cwd=_ROOT, stdout=_STANDARD_ERROR)
        problem = None
        try:
            status = process.wait(seconds + _GRACE_SECONDS)
            problem = f"its process ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            problem = f"still at work after {seconds + _GRACE_SECONDS:.0f} s, and stopped"
        finally:
            process.kill()
            process.wait()
        result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"complete": False, "failures": []}
    if problem:
        result |= {"status": FAILED, "complete": False, "failures": [*result["failures"], problem]}
    return result


def _git_commit() -> str | None:
    """With a + where the working tree differs from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
