"""What a part of the check is given, and how it tells what it found: as it goes, so that nothing is lost if it ends."""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# How long each may take, in seconds, on a fast GPU. A part that is done early leaves its time to those after it.
PARTS = {"device": 20, "suite": 90, "bandwidth": 105, "throughput": 130, "end_to_end": 105}
NOT_RUN, PASSED, FAILED = "not run", "passed", "failed"


@dataclass
class Part:
    """result: what goes into the JSON file. Times are seconds; `seconds` is how long the part may take."""

    name: str
    path: Path
    seconds: float
    implementation: str
    dry_run: bool
    result: dict[str, Any] = field(default_factory=lambda: {"status": PASSED, "complete": False, "failures": []})
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def has_time_for(self, seconds: float) -> bool:
        return self.elapsed + seconds <= self.seconds

    def put(self, **values: Any) -> None:
        self.result |= values
        self.result["seconds"] = round(self.elapsed, 2)
        write_json(self.path, self.result)

    def fail(self, message: str) -> None:
        self.note(f"FAILED: {message}")
        self.put(status=FAILED, failures=[*self.result["failures"], message])

    def note(self, line: str) -> None:
        print(f"[{self.name} {self.elapsed:5.1f} s] {line}", file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """What an exception says, in one line that is not too long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


def write_json(path: Path, value: Any) -> None:
    """In one go: a reader, or a run that is killed, never sees half a file."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    os.replace(unfinished, path)
