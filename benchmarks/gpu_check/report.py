"""The summary: under 60 lines, whatever happened."""

from collections.abc import Iterator
from typing import Any

_MOST_FAILURES = 12
_WIDTH = 118


def summary(report: dict[str, Any]) -> str:
    parts = report["parts"]
    lines = ["", *_head(report)]
    for name, lines_of in {
        "suite": _suite,
        "bandwidth": _bandwidth,
        "throughput": _throughput,
        "end_to_end": _end_to_end,
    }.items():
        if name in parts:
            lines += [_status(name, parts[name]), *lines_of(parts[name])]
    failures = [f"  {name}: {failure}" for name, part in parts.items() for failure in part["failures"]]
    if failures:
        lines += ["failures:", *(line[:_WIDTH] for line in failures[:_MOST_FAILURES])]
        if len(failures) > _MOST_FAILURES:
            lines.append(f"  and {len(failures) - _MOST_FAILURES} more")
    result = f"FAILED: {', '.join(report['failed'])}" if report["failed"] else "passed"
    return "\n".join([*lines, f"{result} after {report['seconds']:.0f} s, written to {report['out']}"])


def _head(report: dict[str, Any]) -> Iterator[str]:
    device = report["parts"]["device"]
    if report["dry_run"]:
        yield "DRY RUN on a CPU, tiny sizes: no figure below means anything"
    versions = device.get("versions", {})
    yield f"{report['device']}, driver {device.get('driver')}, {' '.join(str(device.get('platform_version')).split())}"
    yield f"jax {versions.get('jax')}, jaxlib {versions.get('jaxlib')}, {report['implementation']} attention, " + (
        f"commit {report['git_commit']}, {report['date']}"
    )


def _status(name: str, part: dict[str, Any]) -> str:
    is_cut = part["status"] == "passed" and not part["complete"]
    return f"{name}: {part['status']}{', but not all of it, for want of time or memory' if is_cut else ''}"


def _suite(part: dict[str, Any]) -> Iterator[str]:
    if "num_checked" not in part:
        return
    yield f"  {part['num_checked']} of {part['num_cases']} cases against float64"
    for dtype, worst in sorted(part["worst"].items()):
        yield f"  {dtype}: worst error {worst['absolute']:.1e}, {worst['share_of_tolerance']:.0%} of the tolerance"


def _bandwidth(part: dict[str, Any]) -> Iterator[str]:
    if "copy" not in part:
        return
    yield f"  a copy moves {part['copy']['bytes_per_second'] / 1e9:.0f} GB/s; decode attention, bf16, share of that:"
    contexts = sorted({row["context"] for row in part["decode"]})
    yield (
        "  " + f"{'shape':<14}{'block':>6}{'batch':>7}" + "".join(f"{f'context {context}':>24}" for context in contexts)
    )
    goals = {_key(goal): goal for goal in part["goals"]}
    rows = {_key(row): row for row in part["decode"]}
    for shape, block_size, batch in sorted({key[:3] for key in rows}):
        cells = [_cell(rows.get(key), goals.get(key)) for key in [(shape, block_size, batch, c) for c in contexts]]
        yield "  " + f"{shape:<14}{block_size:>6}{batch:>7}" + "".join(f"{cell:>24}" for cell in cells)
    if any(row["is_in_cache"] for row in rows.values()):
        yield "  c: so few bytes that a cache may hold them"
    yield from (f"  skipped: {line}" for line in part["skipped"])
    for block_size in sorted({write["block_size"] for write in part["write"]}):
        times = [w for w in part["write"] if w["block_size"] == block_size]
        texts = (f"{w['rows']} rows {w['median_us']:.1f} us ({w['bytes_per_second'] / 1e9:.1f} GB/s)" for w in times)
        copied = any((w["temporary_bytes"] or 0) > w["pool_bytes"] / 2 for w in times)
        yield f"  KV write, block {block_size}: {', '.join(texts)}{'; THE POOL IS COPIED' if copied else ''}"


def _key(row: dict[str, Any]) -> tuple[str, int, int, int]:
    return row["shape"], row["block_size"], row["batch"], row["context"]


def _cell(row: dict[str, Any] | None, goal: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    mark = "c" if row["is_in_cache"] else " "
    if goal is not None:
        mark += f" {'met' if goal['met'] else f'BELOW {goal["goal"]:.0%}'}"
    return f"{row['share_of_copy']:.0%} {row['median_us']:.0f} us {mark}"


def _throughput(part: dict[str, Any]) -> Iterator[str]:
    if not part.get("loads"):
        return
    load = min(part["loads"], key=lambda load: load["seconds"])
    yield f"  {part['driver']}, {part['requests']} requests, {part['prompt_tokens']} tokens in, compiled in " + (
        f"{part['compile_seconds']:.0f} s"
    )
    rates = ", ".join(f"{load['output_tokens_per_second']:.0f}" for load in part["loads"])
    yield f"  output tokens/s in {len(part['loads'])} loads: {rates}; the best one:"
    yield f"  {load['seconds']:.2f} s, {load['steps']} steps in {load['runs']} runs, decode " + (
        f"{load['decode_tokens_per_second'] or 0:.0f} tokens/s"
    )
    yield f"  the device waited {load['idle_share']:.2%} of the time for the next run; the host's calls took " + (
        f"{load['dispatch_seconds']:.2f} s"
    )
    if "single_sequence" in part:
        yield f"  one sequence alone: {part['single_sequence']['decode_step_ms']:.2f} ms a token"
    profile = part.get("profile", {})
    if "share" in profile:
        yield f"  within runs some kernel ran {profile['share']:.1%} of the time; the rest is the host's share"
    elif "error" in profile:
        yield f"  the share of the time within runs that kernels run is not known: {profile['error']}"[:_WIDTH]


def _end_to_end(part: dict[str, Any]) -> Iterator[str]:
    for name, model in part.get("models", {}).items():
        ties = sum(difference["is_near_tie"] for difference in model["differences"])
        yield f"  {name}: {model['equal_sequences']} of {model['sequences']} sequences equal the reference's, " + (
            f"{ties} differ from a near tie on; {model['preemptions']} preemptions, {model['chunks']} chunks"
        )
