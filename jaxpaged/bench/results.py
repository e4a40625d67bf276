"""Everything that a benchmark run found, as the dictionary that `--json` writes. Seconds, bytes and tokens."""

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxpaged.bench.floors import Floors, middle_of
from jaxpaged.bench.measure import Served, decode_step_seconds, seconds_by_bucket
from jaxpaged.bench.steps import Steps
from jaxpaged.engine.config import EngineConfig


def rates(served: Served, prompt_tokens: int) -> dict[str, Any]:
    """How fast one repetition was."""
    return {
        "seconds": served.seconds,
        "output_tokens_per_second": served.output_tokens / served.seconds,
        "total_tokens_per_second": (served.output_tokens + prompt_tokens) / served.seconds,
        "idle_share": served.idle_seconds / served.seconds,
        "idle_between_runs_share": served.idle_between_runs / served.seconds,
        "slept_seconds": served.slept,
        "runs": len(served.runs),
        "to_first_token": percentiles([times.to_first_token for times in served.times]),
        "per_output_token": percentiles([t for times in served.times if (t := times.per_output_token) is not None]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99; None of nothing."""
    return {f"p{p}": float(np.percentile(seconds, p)) for p in (50, 90, 99)} if seconds else None


def middle(repetitions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the repetitions."""
    first = repetitions[0]
    return {
        key: middle([each[key] for each in repetitions])
        if isinstance(value, dict)
        else None
        if value is None
        else median(each[key] for each in repetitions)
        for key, value in first.items()
    }


def steps_summary(served: Sequence[Served], steps: Sequence[Steps], config: EngineConfig) -> dict[str, Any]:
    """What the steps of the first repetition were, and their times in all of them, bucket by bucket.

    step_seconds: the median over the runs that had steps of this bucket alone, None without such runs.
    """
    first = steps[0]
    times: dict[int, list[float]] = {}
    for each, own_steps in zip(served, steps, strict=True):
        for index, seconds in seconds_by_bucket(each, own_steps).items():
            times.setdefault(index, []).extend(seconds)
    buckets = []
    for index, bucket in enumerate(config.buckets):
        inside = first.bucket == index
        rows = int(first.rows[inside].sum())
        buckets.append(
            {
                **asdict(bucket),
                "steps": int(inside.sum()),
                "rows_used": rows,
                "rows_padded": int(inside.sum()) * bucket.rows - rows,
                "step_seconds": median(times[index]) if index in times else None,
                "timed_runs": len(times.get(index, [])),
            }
        )
    return {
        "steps": len(first),
        "prefill_steps": int(first.prefills.sum()),
        "computed_tokens": int(first.rows.sum()),
        "reused_prompt_tokens": int(first.reused.sum()),
        "preemptions": int(first.preempted.sum()),
        "buckets": buckets,
        "heads": _heads(first, config),
    }


def _heads(steps: Steps, config: EngineConfig) -> list[dict[str, int]]:
    """The shapes that the head ran in, on the rows that sample."""
    levels = np.array(config.row_levels)
    level = np.searchsorted(levels, steps.sampled)
    found = []
    for index, rows in enumerate(levels.tolist()):
        inside = level == index
        used = int(steps.sampled[inside].sum())
        padded = int(inside.sum()) * rows - used
        found.append({"rows": rows, "steps": int(inside.sum()), "rows_used": used, "rows_padded": padded})
    return found


def floors_summary(passes: Sequence[Floors]) -> dict[str, Any]:
    """The medians, and how far apart the passes were at most."""
    floors = middle_of(passes)
    return {
        "read_bytes_per_second": floors.read_bytes_per_second,
        "read_write_bytes_per_second": floors.read_write_bytes_per_second,
        "weight_bytes": floors.weight_bytes,
        "weights_seconds": floors.weights_seconds,
        "layers_seconds": {str(rows): seconds for rows, seconds in floors.layers.items()},
        "head_seconds": {str(rows): seconds for rows, seconds in floors.head.items()},
        "passes": len(passes),
        "spread": max(
            max(each.layers[rows] for each in passes) / min(each.layers[rows] for each in passes)
            for rows in floors.layers
        ),
    }


def decode_share(served: Served, steps: Steps, batch: int, floors: Floors) -> dict[str, Any] | None:
    """A decode step at `batch` sequences beside its floors; None if no run had only such steps."""
    seconds = decode_step_seconds(served, steps, batch)
    if not seconds:
        return None
    step, products = median(seconds), float(floors.step_seconds(batch, batch))
    return {
        "batch": batch,
        "step_seconds": step,
        "runs": len(seconds),
        "products_seconds": products,
        "products_share": products / step,
        "weights_seconds": floors.weights_seconds,
        "weights_share": floors.weights_seconds / step,
    }


def workload_share(served: Sequence[Served], steps: Sequence[Steps], passes: Sequence[Floors]) -> dict[str, Any]:
    """The products of all steps, each at the rows that it had use for, as a share of the time of each repetition.

    `passes` has one more than there are repetitions: each is between the two passes that its floors are from.
    """
    products = []
    for index, own in enumerate(steps):
        floors = middle_of(passes[index : index + 2])
        products.append(float(floors.step_seconds(own.rows, own.sampled).sum()))
    shares = [each / (run.seconds - run.slept) for each, run in zip(products, served, strict=True)]
    return {"products_seconds": median(products), "products_share": median(shares), "products_shares": shares}


def padding_seconds(steps: Steps, config: EngineConfig, floors: Floors) -> list[float]:
    """What padded rows cost in products, by the floors, in the steps of each bucket; without the head's."""
    none = np.zeros_like(steps.rows)
    costs = floors.step_seconds(np.array([bucket.rows for bucket in config.buckets])[steps.bucket], none)
    costs = costs - floors.step_seconds(steps.rows, none)
    return [float(costs[steps.bucket == index].sum()) for index in range(len(config.buckets))]


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{device.platform}: {device.device_kind}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "commit": _commit(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of the source tree this runs from, with a + if files differ from it; None if it is installed without one."""
    here = Path(__file__)

    def git(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, check=check)

    try:
        git("ls-files", "--error-unmatch", here.name)
        is_changed = git("diff", "--quiet", "HEAD", "--", ":/", check=False).returncode != 0
        return git("rev-parse", "--short=12", "HEAD").stdout.strip() + "+" * is_changed
    except (OSError, subprocess.CalledProcessError):
        return None
