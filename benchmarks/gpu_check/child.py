"""`python -m benchmarks.gpu_check.child NAME ...`: one part of the check, in a process of its own.

A kernel that reads where it must not spoils all later work of its process; and a process gives its memory back.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_check.part import PARTS, Part, one_line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--implementation", required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    part = Part(args.name, args.result, args.seconds, args.implementation, args.dry_run)
    part.put()
    try:
        import_module(f"benchmarks.gpu_check.{args.name}").run(part)
    except Exception as error:  # whatever it is, the next part goes on
        part.fail(one_line(error))
    else:
        part.put()
    return 0


if __name__ == "__main__":
    sys.exit(main())
