"""What a benchmark run found, as a table for people."""

from collections.abc import Iterator, Sequence
from typing import Any

Row = Sequence[str]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The first column to the left, the others to the right; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def report(found: dict[str, Any]) -> str:
    lines = [*_head(found), "", *_rates(found), *_requests(found), ""]
    if "floors" in found:
        lines += [*_floors(found), ""]
    lines += [*_idle(found), *_compiles(found), *_memory(found), *_notes(found)]
    return "\n".join(lines)


def _head(found: dict[str, Any]) -> Iterator[str]:
    machine, workload, engine = found["machine"], found["workload"], found["engine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    yield f"{found['start']['model']}, weights {' and '.join(found['start']['dtypes'])}, commit {machine['commit']}"
    yield f"{machine['device']}, {machine['processor']}, {machine['cores']} cores; {versions}"
    yield (
        f"{workload['name']}: {workload['requests']} requests, {workload['prompt_tokens']} prompt tokens, "
        f"{workload['output_tokens']} output tokens, seed {workload['seed']}"
    )
    yield (
        f"{engine['num_blocks']} blocks of {engine['block_size']}, {engine['max_num_seqs']} sequences, "
        f"{engine['max_num_batched_tokens']} tokens a step, up to {engine['max_steps']} steps a run"
    )


def _rates(found: dict[str, Any]) -> Iterator[str]:
    repetitions, middle = found["repetitions"], found["measured"]
    rows: list[Row] = [("", "median", *(f"#{number + 1}" for number in range(len(repetitions))))]
    for key, name, digits in (
        ("output_tokens_per_second", "output tokens/s", 1),
        ("total_tokens_per_second", "total tokens/s", 1),
        ("seconds", "seconds", 2),
    ):
        rows.append((name, *(f"{each[key]:.{digits}f}" for each in (middle, *repetitions))))
    yield from table(rows)
    for name, cost in found["costs"].items():
        ratios = ", ".join(f"{ratio:.3f}" for ratio in cost["ratios"])
        yield f"with {name}: {cost['ratio']:.3f} of the tokens/s without, one after the other ({ratios})"


def _requests(found: dict[str, Any]) -> Iterator[str]:
    rows: list[Row] = [("ms", "p50", "p90", "p99")]
    for key, name in (("to_first_token", "to the first token"), ("per_output_token", "per output token")):
        values = found["measured"][key]
        if values:
            rows.append((name, *(f"{1e3 * value:.1f}" for value in values.values())))
    yield ""
    yield from table(rows)


def _floors(found: dict[str, Any]) -> Iterator[str]:
    floors, share = found["floors"], found["share"]
    yield (
        f"this machine: reads {floors['read_bytes_per_second'] / 1e9:.1f} GB/s, reads and writes "
        f"{floors['read_write_bytes_per_second'] / 1e9:.1f} GB/s; samples up to {floors['spread']:.2f}x apart"
    )
    rows: list[Row] = [("", "measured", "floor", "share", "times")]
    for step in found["decode"]:
        measured, name = step["step_seconds"], f"decode step at batch {step['batch']}"
        rows.append(_share_row(f"{name}: its matrix products", measured, step["products_seconds"], "ms"))
        if step["batch"] == 1:
            rows.append(_share_row(f"{name}: reading the weights", measured, step["weights_seconds"], "ms"))
    # The share is the median over the repetitions, each beside its own floors.
    products = share["products_seconds"]
    rows.append(_share_row("the workload: its matrix products", products / share["products_share"], products, "s"))
    yield from table(rows)


def _share_row(name: str, measured: float, floor: float, unit: str) -> Row:
    scale = 1e3 if unit == "ms" else 1.0
    return (
        name,
        f"{scale * measured:.2f} {unit}",
        f"{scale * floor:.2f} {unit}",
        f"{floor / measured:.0%}",
        f"{measured / floor:.2f}x",
    )


def _idle(found: dict[str, Any]) -> Iterator[str]:
    measured = found["measured"]
    yield (
        f"device idle: {measured['idle_share']:.2%} of the time, {measured['idle_between_runs_share']:.2%} between its "
        f"{measured['runs']:.0f} runs"
    )


def _compiles(found: dict[str, Any]) -> Iterator[str]:
    start, after = found["start"], found["compiles_after_warm_up"]
    before = start["compiles"]
    yield (
        f"start: {start['seconds']:.1f} s, of which {before['seconds']:.1f} s for {before['programs']} programs "
        f"({before['from_disk']} from the cache on disk)"
    )
    yield f"compiles after warm-up: {after['programs']} ({after['seconds']:.2f} s)"


def _memory(found: dict[str, Any]) -> Iterator[str]:
    held, start = found["memory"], found["start"]
    yield (
        f"memory: weights {_mb(held['weight_bytes'])} and pools {_mb(held['pool_bytes'])}, "
        f"other state {_mb(held['other_state_bytes'])}"
    )
    of = "while it ran" if held["peak_is_of_the_workload"] else "since the start"
    now = "" if start["held_host_bytes"] is None else f", {_mb(start['held_host_bytes'])} held after that"
    before, loading = _mb(start["peak_host_bytes_before"]), _mb(start["peak_host_bytes"])
    yield (
        f"peak of the process: {before} before it loaded, {loading} while it loaded{now}; "
        f"{_mb(held['peak_host_bytes'])} {of}"
    )
    if held["peak_device_bytes"] is not None:
        yield f"peak of the device: {_mb(held['peak_device_bytes'])}"


def _notes(found: dict[str, Any]) -> Iterator[str]:
    steps, workload = found["steps"], found["workload"]
    yield (
        f"steps: {steps['steps']}, {steps['prefill_steps']} of them with a prefill; {steps['computed_tokens']} tokens "
        f"computed; {steps['preemptions']} preemptions"
    )
    if workload["shared_prefix"]:
        reused, shared = steps["reused_prompt_tokens"], workload["shared_prefix"] * (workload["requests"] - 1)
        note = "" if reused else ": no prefix cache is at work"
        yield f"prefix: {reused} of {shared} shared prompt tokens were not computed again{note}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def explain_buckets(found: dict[str, Any]) -> str:
    """The compiled shapes, what ran in them, and what they padded."""
    lines = ["", "buckets: the shapes that the model runs in; a step takes the smallest that it fits in"]
    rows: list[Row] = [
        ("rows", "decode tiles", "prefill tiles", "steps", "tokens", "padded", "padding", "products of it", "step")
    ]
    for bucket in found["steps"]["buckets"]:
        cost, step = bucket.get("padding_seconds"), bucket["step_seconds"]
        rows.append(
            (
                str(bucket["rows"]),
                str(bucket["decode_tiles"]),
                str(bucket["prefill_tiles"]),
                str(bucket["steps"]),
                str(bucket["rows_used"]),
                str(bucket["rows_padded"]),
                _padding(bucket),
                "-" if cost is None else f"{cost:.3f} s",
                "-" if step is None else f"{1e3 * step:.1f} ms",
            )
        )
    lines += table(rows)
    lines += ["", "heads: the shapes that the head and the choice of a token run in"]
    heads: list[Row] = [("rows", "steps", "tokens", "padded", "padding")]
    for head in found["steps"]["heads"]:
        heads.append(
            (str(head["rows"]), str(head["steps"]), str(head["rows_used"]), str(head["rows_padded"]), _padding(head))
        )
    return "\n".join([*lines, *table(heads)])


def _padding(shape: dict[str, Any]) -> str:
    computed = shape["rows_used"] + shape["rows_padded"]
    return f"{shape['rows_padded'] / computed:.0%}" if computed else "-"
