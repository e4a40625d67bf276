"""Results as files: one for programs to read, one for people."""

import json
from pathlib import Path
from typing import Any

from benchmarks.topology import versions

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, rows: list[dict[str, Any]], tables: str) -> None:
    """`results/<name>.json` and `.md`, each with the versions that made them."""
    RESULTS.mkdir(exist_ok=True)
    made_with = versions()
    (RESULTS / f"{name}.json").write_text(json.dumps({"versions": made_with, "rows": rows}, indent=1) + "\n")
    of = ", ".join(f"{package} {version}" for package, version in made_with.items())
    (RESULTS / f"{name}.md").write_text(f"Made by `python -m benchmarks.{name}` with {of}.\n\n{tables}\n")
