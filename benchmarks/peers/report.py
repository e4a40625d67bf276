"""What was measured, as a dictionary for `--json` and as a table in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.peers.engines.protocol import OUTPUT1, PROMPT1
from benchmarks.peers.peers import BASELINE
from benchmarks.peers.rounds import Load, Measured

# More than this of a core in a waiting process takes something from the one that works.
_NOTED_SHARE = 0.02
_NOTED_DISTURBANCE = 0.1  # cores; the driver and the system take a little


def results(found: Mapping[str, Measured], missing: Mapping[str, str], load: Load) -> dict[str, Any]:
    """The figures of each peer and number of requests, and the notes. missing: peers that were not started, and why."""
    baseline = found.get(BASELINE)
    rows = [
        _row(name, measured, size, load, baseline)
        for name, measured in found.items()
        for size in sorted(measured.rates, reverse=True)
    ]
    notes = {name: [reason] for name, reason in missing.items()}
    for name, measured in found.items():
        if own := list(_notes(measured)):
            notes[name] = own
    return {"rows": rows, "notes": notes}


def _row(name: str, measured: Measured, size: int, load: Load, baseline: Measured | None) -> dict[str, Any]:
    rates = measured.rates[size]
    others = baseline.rates.get(size, []) if baseline else []
    # A peer that failed has fewer rounds: each ratio is of one round.
    ratios = [rate / other for rate, other in zip(rates, others, strict=False)]
    assert measured.ready, "only what is ready runs"
    return {
        "peer": name,
        "version": measured.ready.version,
        "dtype": measured.ready.dtype,
        "threads": measured.ready.threads,
        "load_seconds": measured.ready.seconds,
        "requests": size,
        "prompt_tokens": sum(load.prompts[:size]),
        "output_tokens": sum(load.outputs[:size]),
        "output_tokens_per_second": rates,
        "ratios": ratios,
        "seconds_per_token": measured.decodes,
        "agreement": _agreement(measured.token_ids[size], baseline.token_ids.get(size) if baseline else None),
        "waiting_share": measured.waiting_share,
        "disturbance": measured.disturbance,
    }


def _agreement(token_ids: list[list[int]], others: list[list[int]] | None) -> dict[str, int] | None:
    """Greedy outputs beside the baseline's: tokens up to the first difference of each request, and whole requests."""
    if others is None:
        return None
    pairs = list(zip(token_ids, others, strict=True))
    same = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    return {"tokens": sum(same), "requests": sum(ids == other for ids, other in pairs)}


def _notes(measured: Measured) -> Iterator[str]:
    if measured.ready:
        yield from measured.ready.notes
    if measured.failure:
        yield f"failed: {measured.failure}"
    if measured.waiting_share and measured.waiting_share > _NOTED_SHARE:
        yield f"used up to {measured.waiting_share:.0%} of a core while another one worked"
    if measured.disturbance and measured.disturbance > _NOTED_DISTURBANCE:
        yield f"while it worked, other programs used up to {measured.disturbance:.1f} cores"


def markdown(found: Mapping[str, Any]) -> str:
    """`found`: what `--json` writes."""
    machine, workload = found["machine"], found["workload"]
    lines = [
        f"{workload['requests']} requests, {workload['prompt_tokens']:,} prompt tokens, "
        f"{workload['output_tokens']:,} output tokens, greedy, EOS ignored; {found['model']}.",
        f"{machine['processor']}, {machine['cores']} cores; {machine['date'][:10]}, commit {machine['commit']}; "
        f"{found['repeats']} rounds.",
        "",
        *_table([_HEAD, *map(_cells, found["rows"])]),
        "",
        "Median (lowest-highest) of the rounds. x ours: the median of the ratios to ours in the same round. "
        f"Batch 1: the decodes of one request of {PROMPT1} prompt tokens and {OUTPUT1} output tokens. Same tokens: "
        "output tokens equal to ours up to the first difference of each request (in brackets, requests equal to the "
        "end).",
    ]
    if found["notes"]:
        lines += ["", *(f"- {name}: {'; '.join(notes)}" for name, notes in found["notes"].items())]
    return "\n".join(lines)


_HEAD = ("peer", "version", "dtype", "threads", "requests", "output tokens/s", "x ours", "ms a token, batch 1",
         "same tokens")  # fmt: skip


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    agreement = row["agreement"]
    return (
        row["peer"],
        row["version"],
        row["dtype"],
        str(row["threads"]),
        str(row["requests"]),
        _range(row["output_tokens_per_second"], 1),
        f"{median(row['ratios']):.2f}" if row["ratios"] else "-",
        _range([1e3 * seconds for seconds in row["seconds_per_token"]], 1),
        f"{agreement['tokens']:,} of {row['output_tokens']:,} ({agreement['requests']})" if agreement else "-",
    )


def _range(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    yield from (head, "|" + "---|" * len(rows[0]), *others)
