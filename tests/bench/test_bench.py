"""`python -m jaxpaged.bench` on a tiny model: that all is measured and adds up. No figure is held to a time."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpaged.bench import __main__ as bench
from jaxpaged.bench.compiles import CompileCounter
from jaxpaged.bench.measure import serve_all
from jaxpaged.bench.probe import traced
from jaxpaged.bench.report import report
from jaxpaged.bench.session import Options, run_session
from jaxpaged.bench.workloads import DEFINITIONS, draw
from jaxpaged.engine.engine import Engine
from jaxpaged.trace import Finished, read_jsonl
from tests.tiny_llm import SIZES, VOCAB_SIZE, tiny_folder, tiny_llm

LOAD = "--requests 9 --prompt-len 3-30 --output-len 2-12"
ENGINE = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in (SIZES | {"num_blocks": 64}).items())


@pytest.fixture(autouse=True)
def no_cache(monkeypatch) -> None:
    """Tests leave nothing in the user's cache, and JAX's configuration as it is."""
    monkeypatch.setattr(bench, "use_compilation_cache", lambda: None)


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Iterator[tuple[int, dict, Path]]:
    """One run with every option, whose exit status and JSON several tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "use_compilation_cache", lambda: None)
        path = tmp_path_factory.mktemp("bench") / "found.json"
        status = main(f"{LOAD} {ENGINE} --repeats 2 --trace --stream --explain-buckets --json {path}")
        yield status, json.loads(path.read_text()), path


def main(arguments: str) -> int:
    return bench.main(["--model", str(tiny_folder()), *shlex.split(arguments)])


def test_nothing_compiles_after_the_warm_up(everything) -> None:
    status, found, _ = everything
    assert found["compiles_after_warm_up"] == {"programs": 0, "from_disk": 0, "seconds": 0.0}
    assert found["start"]["compiles"]["programs"] > 0
    assert status == 0


def test_a_compile_after_the_warm_up_is_the_exit_status(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Engine, "warm_up", lambda engine, lowered: None)
    assert main(f"latency --prompt-len 3 --output-len 2 {ENGINE} --repeats 1 --no-floors") == 1
    assert "were compiled after the warm-up" in capsys.readouterr().err


def test_the_steps_add_up(everything) -> None:
    """Every prompt token is computed once, and every output token but each request's last."""
    _, found, _ = everything
    workload, steps, engine = found["workload"], found["steps"], found["engine"]
    computed = workload["prompt_tokens"] + workload["output_tokens"] - workload["requests"]
    assert steps["preemptions"] == 0
    assert steps["computed_tokens"] == computed == sum(bucket["rows_used"] for bucket in steps["buckets"])
    assert sum(bucket["steps"] for bucket in steps["buckets"]) == steps["steps"]
    assert all(
        bucket["rows_used"] + bucket["rows_padded"] == bucket["steps"] * bucket["rows"] for bucket in steps["buckets"]
    )
    assert sum(head["rows_used"] for head in steps["heads"]) == workload["output_tokens"]
    assert max(bucket["rows"] for bucket in steps["buckets"]) == engine["max_num_batched_tokens"]


def test_rates_and_shares_are_ratios_of_what_was_measured(everything) -> None:
    _, found, _ = everything
    for each in found["repetitions"]:
        assert each["output_tokens_per_second"] * each["seconds"] == pytest.approx(found["workload"]["output_tokens"])
        assert 0 <= each["idle_between_runs_share"] <= each["idle_share"] < 1
        assert 0 < each["to_first_token"]["p50"] <= each["to_first_token"]["p99"] <= each["seconds"]
    assert [step["batch"] for step in found["decode"]] == [4, 1]
    for step in found["decode"]:
        assert step["products_share"] == pytest.approx(step["products_seconds"] / step["step_seconds"])
    assert len(found["share"]["products_shares"]) == 2
    assert {name: len(cost["ratios"]) for name, cost in found["costs"].items()} == {"trace": 2, "stream": 2}


def test_memory_names_its_parts(everything) -> None:
    _, found, _ = everything
    held = found["memory"]
    assert held["weight_bytes"] == found["floors"]["weight_bytes"] + 7 * 64 * found_bytes(found)  # seven norms
    assert held["peak_host_bytes"] > held["weight_bytes"] + held["pool_bytes"] > 0


def found_bytes(found: dict) -> int:
    return {"float32": 4, "bfloat16": 2}[found["start"]["dtypes"][0]]


def test_two_runs_are_compared(everything, tmp_path, capsys) -> None:
    """B, made twice as fast on a machine that is twice as fast, is as good as A without the machine."""
    _, found, a = everything
    faster = json.loads(json.dumps(found))
    faster["measured"]["output_tokens_per_second"] *= 2
    faster["share"]["products_seconds"] /= 2
    b = tmp_path / "b.json"
    b.write_text(json.dumps(faster))
    assert bench.main(["--compare", str(a), str(b)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [row for row in rows if row[:2] == ["output", "tokens/s"]]
    assert row[-3:] == ["2.000", "0.500", "1.000"]
    (row,) = [row for row in rows if row[:1] == ["seconds"] and len(row) == 6]
    assert row[-3:] == ["1.000", "0.500", "2.000"]


def test_runs_of_different_workloads_are_not_compared(everything, tmp_path, capsys) -> None:
    _, found, a = everything
    other = json.loads(json.dumps(found))
    other["workload"]["requests"] += 1
    (tmp_path / "b.json").write_text(json.dumps(other))
    assert bench.main(["--compare", str(a), str(tmp_path / "b.json")]) == 1
    assert "different workloads: requests is 9 and 10" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["latency", "prefill", "shared-prefix", "serve-like"])
def test_the_other_workloads(name: str) -> None:
    sizes = {"prompt_len": (4, 8), "output_len": (1, 6)}
    several = {"requests": 6} if DEFINITIONS[name].requests > 1 else {}
    prefix = {"shared_prefix": 8} if DEFINITIONS[name].shared_prefix else {}
    rate = {"rate": 200.0} if DEFINITIONS[name].rate else {}
    load = draw(replace(DEFINITIONS[name], **sizes, **several, **prefix, **rate), VOCAB_SIZE)
    with CompileCounter() as counter:
        found = run_session(tiny_llm(), load, Options(repeats=1, floors=False), counter, started())
    assert found["compiles_after_warm_up"]["programs"] == 0
    assert found["measured"]["to_first_token"]["p50"] > 0
    assert "floors" not in found
    text = report(found)
    assert f"{name}: " in text
    assert "no prefix cache is at work" not in text
    assert ("of 40 shared prompt tokens were not computed again" in text) == (name == "shared-prefix")


def started() -> dict:
    compiles = {"programs": 0, "from_disk": 0, "seconds": 0.0}
    peaks = {"peak_host_bytes_before": 1, "peak_host_bytes": 1, "held_host_bytes": None}
    return {"model": "tiny", "dtypes": ["float32"], "seconds": 1.0, "compiles": compiles, **peaks}


def test_a_request_that_comes_later_is_served_later() -> None:
    load = draw(replace(DEFINITIONS["serve-like"], requests=2, prompt_len=(4, 4), output_len=(2, 2)), VOCAB_SIZE)
    load = replace(load, requests=[load.requests[0], replace(load.requests[1], arrival=load.requests[0].arrival + 0.3)])
    with CompileCounter() as counter:
        found = run_session(tiny_llm(), load, Options(repeats=1, floors=False), counter, started())
    assert found["measured"]["seconds"] > load.requests[1].arrival
    assert found["measured"]["slept_seconds"] > 0


def test_the_trace_is_on_while_it_is_measured_and_as_before_then(tmp_path) -> None:
    llm, path = tiny_llm(), tmp_path / "trace.jsonl"
    before = llm._trace, llm.engine._emit
    load = draw(replace(DEFINITIONS["throughput"], requests=3, prompt_len=(4, 4), output_len=(3, 3)), VOCAB_SIZE)
    with traced(llm, path):
        serve_all(llm, load)
    with path.open() as file:
        assert sum(isinstance(event, Finished) for event in read_jsonl(file)) == 3
    assert (llm._trace, llm.engine._emit) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("fastest", "invalid choice: 'fastest'"),
        ("--prompt-len 5-", "'5-' is neither a number of tokens nor a range"),
        ("--repeats 0", "--repeats must be at least 1, not 0"),
        ("latency --nano", "--nano is a kind of throughput, not of latency"),
        ("--rate 3", "--rate is of serve-like"),
        ("--json no/such/folder.json", "--json: there is no folder no/such"),
        ("--compare missing.json missing.json", "missing.json cannot be read: No such file"),
        ("--write-workload load.json --requests 0", "requests must be at least 1, not 0"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: str, message: str, capsys) -> None:
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    lines = capsys.readouterr().err.splitlines()
    assert status
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_a_workload_that_does_not_fit_is_refused() -> None:
    load = draw(replace(DEFINITIONS["throughput"], requests=1, prompt_len=(60, 60), output_len=(9, 9)), VOCAB_SIZE)
    with CompileCounter() as counter, pytest.raises(ValueError, match="has 69 tokens, max_model_len is 64"):
        run_session(tiny_llm(), load, Options(repeats=1, floors=False), counter, started())
