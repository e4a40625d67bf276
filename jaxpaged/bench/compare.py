"""Two benchmark runs beside each other: ratios, and the same ratios in shares of what the machine could do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpaged.bench.report import Row, table

FORMAT = 1  # of what --json writes

Found = dict[str, Any]


def read(path: Path) -> Found:
    """What `--json` wrote. Raises ValueError, naming the file, for anything else."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not what --json wrote: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not what --json wrote: its format is not {FORMAT}")
    return found


def compare(a: Found, b: Found) -> str:
    """Raises ValueError if they are not of one workload."""
    different = sorted(key for key in a["workload"] if a["workload"][key] != b["workload"].get(key))
    if different:
        key = different[0]
        raise ValueError(f"different workloads: {key} is {a['workload'][key]} and {b['workload'].get(key)}")
    rows: list[Row] = [("", "A", "B", "B / A", "floor B / A", "without the machine")]
    rows += [row for figure in FIGURES if (row := _row(a, b, *figure))]
    heads = [f"{name}: {_who(found)}" for name, found in (("A", a), ("B", b))]
    last = "without the machine: B / A if the floors of both had been the same; figures without a floor have none"
    return "\n".join([f"{a['workload']['name']}, B beside A", *heads, "", *table(rows), "", last])


def _who(found: Found) -> str:
    machine, start = found["machine"], found["start"]
    return f"{start['model']}, {' and '.join(start['dtypes'])}, commit {machine['commit']}, {machine['date']}, " + (
        f"{machine['processor']}"
    )


Get = Callable[[Found], float | None]


def _row(a: Found, b: Found, name: str, get: Get, floor: Get | None, digits: int, grows: bool) -> Row | None:
    """None if one of them has no such figure. grows: whether it is larger on a faster machine; floors are times."""
    first, second = get(a), get(b)
    if first is None or second is None:
        return None
    cells = [name, f"{first:.{digits}f}", f"{second:.{digits}f}"]
    if not first:
        return (*cells, "-", "-", "-")
    ratio = second / first
    before, after = (floor(a), floor(b)) if floor else (None, None)
    if not before or not after:
        return (*cells, f"{ratio:.3f}", "-", "-")
    slower = after / before
    return (*cells, f"{ratio:.3f}", f"{slower:.3f}", f"{ratio * slower if grows else ratio / slower:.3f}")


def _measured(key: str, of: str | None = None, scale: float = 1.0) -> Get:
    def get(found: Found) -> float | None:
        value = found["measured"][key]
        value = value[of] if of and value else value
        return None if value is None else scale * value

    return get


def _products(found: Found) -> float | None:
    return found["share"]["products_seconds"] if "share" in found else None


def _decode(alone: bool, key: str) -> Get:
    """Milliseconds of the decodes of one sequence alone, or of a full batch."""

    def get(found: Found) -> float | None:
        steps = [step for step in found.get("decode", ()) if (step["batch"] == 1) == alone]
        return 1e3 * steps[0][key] if steps else None

    return get


def _memory(found: Found) -> float:
    return found["memory"]["peak_host_bytes"] / 1e6


FIGURES: tuple[tuple[str, Get, Get | None, int, bool], ...] = (
    ("output tokens/s", _measured("output_tokens_per_second"), _products, 1, True),
    ("total tokens/s", _measured("total_tokens_per_second"), _products, 1, True),
    ("seconds", _measured("seconds"), _products, 2, False),
    ("ms to the first token, p50", _measured("to_first_token", "p50", 1e3), _products, 1, False),
    ("ms to the first token, p99", _measured("to_first_token", "p99", 1e3), _products, 1, False),
    ("ms per output token, p50", _measured("per_output_token", "p50", 1e3), _products, 1, False),
    ("ms per output token, p99", _measured("per_output_token", "p99", 1e3), _products, 1, False),
    ("ms, decode step at a full batch", _decode(False, "step_seconds"), _decode(False, "products_seconds"), 2, False),
    ("ms, decode step at batch 1", _decode(True, "step_seconds"), _decode(True, "weights_seconds"), 2, False),
    ("device idle, %", _measured("idle_share", scale=100), None, 2, False),
    ("seconds to start", lambda found: found["start"]["seconds"], None, 2, False),
    ("compiles after warm-up", lambda found: found["compiles_after_warm_up"]["programs"], None, 0, False),
    ("peak memory, MB", _memory, None, 0, False),
)
