"""The check for GPUs, tried on a CPU: it runs whole, and what is broken shows."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import bandwidth, clock, end_to_end, suite, throughput
from benchmarks.gpu_check.part import PARTS, Part
from benchmarks.gpu_check.report import summary
from kernels_pallas.paged_attention import api
from kernels_pallas.paged_attention.reference import Reference

REPO = Path(__file__).parents[2]
# What a bare machine may lack.
BARE = """
import sys
for name in ("msgspec", "gguf", "transformers", "tokenizers", "jinja2", "tqdm", "pytest", "hypothesis"):
    sys.modules[name] = None
"""
BROKEN = """
from kernels_pallas.paged_attention import api
from tests.benchmarks.test_gpu_check import Scaled
api._IMPLEMENTATIONS["broken"] = Scaled(1.01)
"""
RUN_PART = """
import sys
from benchmarks.gpu_check.child import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Scaled(Reference):
    """The reference's attention, times a factor."""

    factor: float = 1.0

    def attend(self, *args: Any) -> Any:
        return (super().attend(*args) * self.factor).astype(args[2].dtype)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api._IMPLEMENTATIONS, "broken", Scaled(1.5))


def part(name: str, tmp_path: Path, implementation: str = "reference") -> Part:
    return Part(name, tmp_path / f"{name}.json", 600, implementation, dry_run=True)


def child(tmp_path: Path, *code: str) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text("".join(code))
    return [sys.executable, str(script)]


def test_a_dry_run_on_a_bare_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every part on the GPU kernels, interpreted, with nothing but jax, flax, numpy and jaxtyping."""
    out = tmp_path / "result.json"
    status = gpu_check.main(["--dry-run", "--out", str(out)], child(tmp_path, BARE, RUN_PART))
    report = json.loads(out.read_text())
    assert status == 0 and report["failed"] == []
    assert (report["device"], report["dry_run"], report["implementation"]) == ("cpu", True, "gpu_interpret")
    assert report["parts"].keys() == PARTS.keys()
    parts = {name: SimpleNamespace(**result) for name, result in report["parts"].items()}
    assert all(result.status == "passed" and result.complete and not result.failures for result in parts.values())
    assert parts["device"].versions["jax"]
    assert parts["suite"].num_checked == parts["suite"].num_cases == suite.SMALL.cases
    assert parts["suite"].worst.keys() == {"float32", "bfloat16"}
    assert len(parts["bandwidth"].decode) == 2 and len(parts["bandwidth"].write) == 1
    assert all(row["median_us"] > 0 for row in parts["bandwidth"].decode + parts["bandwidth"].write)
    assert "no module msgspec" in parts["throughput"].driver
    assert parts["throughput"].loads[0]["output_tokens"] == parts["throughput"].output_tokens
    tiny = parts["end_to_end"].models["tiny"]
    assert tiny["equal_sequences"] == tiny["sequences"] == 4
    assert tiny["preemptions"] and tiny["chunks"]
    printed = capsys.readouterr().out
    assert "DRY RUN" in printed and len(printed.splitlines()) < 60


def test_attention_that_is_one_percent_off_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    options = ["--dry-run", "--implementation", "broken", "--parts", "suite", "--out", str(out)]
    assert gpu_check.main(options, child(tmp_path, BROKEN, RUN_PART)) == 1
    report = json.loads(out.read_text())
    assert report["failed"] == ["suite"]
    assert "dtype=float32" in " ".join(report["parts"]["suite"]["failures"])
    assert "FAILED: suite" in capsys.readouterr().out


@pytest.mark.usefixtures("broken")
def test_tokens_that_differ_fail(tmp_path: Path) -> None:
    checked = part("end_to_end", tmp_path, "broken")
    end_to_end.run(checked)
    differences = checked.result["models"]["tiny"]["differences"]
    assert checked.result["status"] == "failed" and len(checked.result["failures"]) == len(differences) > 0
    # The plain model agrees with the reference's choice, so the margins are real ones.
    assert all(difference["margin"] > end_to_end.NEAR_TIE for difference in differences)


def test_a_near_tie_is_named_and_does_not_fail(tmp_path: Path) -> None:
    checked = part("end_to_end", tmp_path)
    tie = {"margin": 5e-4, "is_near_tie": True}
    result = {"differences": [tie], "preemptions": 1, "chunks": 1, "equal_sequences": 3, "sequences": 4}
    result["distinct_tokens"] = 99
    end_to_end._judge(checked, "tiny", result)
    assert checked.result["failures"] == []
    assert any("1 differ from a near tie on" in line for line in _lines({"end_to_end": {"models": {"tiny": result}}}))
    end_to_end._judge(checked, "tiny", result | {"preemptions": 0})
    end_to_end._judge(checked, "tiny", result | {"distinct_tokens": 4})
    assert [message.split(": ")[1] for message in checked.result["failures"]] == [
        "no preemptions, so the load does not try what it is there for",
        "only 4 distinct tokens came out",
    ]


def _lines(parts: dict[str, Any]) -> list[str]:
    common = {"status": "passed", "complete": True, "failures": []}
    report = {"device": "cpu", "dry_run": True, "implementation": "reference", "git_commit": None, "date": ""}
    report |= {"failed": [], "seconds": 1, "out": "", "parts": {name: common | x for name, x in parts.items()}}
    report["parts"]["device"] = common
    return summary(report).splitlines()


def test_the_load_is_nano_vllms(tmp_path: Path) -> None:
    """Its README reports 133,966 output tokens."""
    load = throughput.nano_vllm_load(256, 100, 1024, 151936)
    assert sum(tokens for _, tokens in load) == 133_966
    assert {len(prompt) for prompt, _ in load} <= set(range(100, 1025))


def test_throughput_through_the_engine(tmp_path: Path) -> None:
    checked = part("throughput", tmp_path)
    throughput.run(checked)
    assert checked.result["driver"] == "Engine" and checked.result["complete"] and not checked.result["failures"]


def test_the_full_sizes_preempt_and_split(tmp_path: Path) -> None:
    """The schedule depends on lengths alone, so a tiny model shows what the real ones will meet."""
    driver = end_to_end.Driver(
        end_to_end.random_model(end_to_end.TINY, "float32"), end_to_end.TINY, end_to_end.FULL.engine
    )
    end_to_end._generate(driver, end_to_end.TINY, end_to_end.FULL)
    assert driver.preemptions >= 2 and driver.chunks >= 4


def test_the_full_sizes_have_the_goals_and_fit() -> None:
    sizes = bandwidth.FULL
    assert {(b, c) for b in sizes.batches for c in sizes.contexts} > bandwidth.GOALS.keys()
    for batch, context in bandwidth.GOALS:
        decode = bandwidth.Decode("qwen3-0.6b", 16, batch, context)
        assert decode.turns(sizes.most_turns) * decode.bytes >= 256 << 20  # no cache holds it
    assert sum(PARTS.values()) + gpu_check._GRACE_SECONDS <= 480


def test_bytes_that_must_be_moved() -> None:
    """Of two sequences of 32 positions, with 3 KV heads and 9 query heads of 64 and 2 blocks each, in bfloat16."""
    decode = bandwidth.Decode("smollm2-135m", 16, 2, 32)
    assert decode.bytes == 2 * (2 * 32 * 3 * 64 * 2 + 2 * 9 * 64 * 2) + 2 * 2 * 4


def test_cases_are_the_same_each_time_and_meet_everything() -> None:
    cases = suite.draw_cases(suite.FULL)
    assert cases == suite.draw_cases(suite.FULL) and len(cases) == 60
    met = {(case.head_dim, case.dtype, case.rows) for case in cases}
    assert len(met) == 4 * 2 * 2
    assert {case.block_size for case in cases} == set(suite._BLOCK_SIZES)
    assert {case.group for case in cases} == set(suite._GROUPS)
    lengths = {first + count for case in cases for first, count in case.tiles if count}
    assert 1 in lengths and max(lengths) > 4000
    assert any(count == 0 for case in cases for _, count in case.tiles)


def test_covered_time_counts_once() -> None:
    assert clock.union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == 4.0


def test_the_time_between_runs() -> None:
    class Ready:
        def block_until_ready(self) -> None:
            pass

    ticks = iter(range(100))
    events = SimpleNamespace(num_steps=Ready())
    runs = clock.RunClock(lambda: (next(ticks), events))
    for _ in range(3):
        runs()
        runs._done[-1].result()
    assert runs.num_runs == 3 and 0 < runs.idle_seconds < 1  # each was over before the next one came


@pytest.mark.parametrize("module", ["jax", "flax", "jaxtyping"])
def test_a_missing_module_is_one_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    assert gpu_check.main(["--dry-run"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1 and f"no module {module} " in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--parts", "suite,speed"], "'speed'"), (["--out", "/no/such/folder/x.json"], "no folder /no/such/folder")],
)
def test_bad_options_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(options) == 1
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 1


WRITE = """
import json, os, sys, time
path = sys.argv[sys.argv.index("--result") + 1]
result = {"status": "passed", "complete": True, "failures": [], "kind": "fake"}
open(path, "w").write(json.dumps(result))
"""


@pytest.mark.parametrize(
    ("end", "message"), [("os.abort()", "ended with status -6"), ("time.sleep(60)", "still at work after 1 s")]
)
def test_a_part_that_dies_or_hangs_is_a_failure_and_the_next_goes_on(
    end: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "PARTS", {"device": 60, "suite": -58.5, "bandwidth": 60, "throughput": -1000})
    monkeypatch.setattr(gpu_check, "_FEWEST_SECONDS", 0)
    monkeypatch.setattr(gpu_check, "_GRACE_SECONDS", 0)
    out = tmp_path / "result.json"
    script = child(tmp_path, WRITE, f"\nif sys.argv[1] == 'suite':\n    {end}\n")
    assert gpu_check.main(["--parts", "suite,bandwidth,throughput", "--out", str(out)], script) == 1
    report = json.loads(out.read_text())
    assert report["failed"] == ["suite"] and message in report["parts"]["suite"]["failures"][0]
    assert report["parts"]["bandwidth"]["status"] == "passed"
    assert report["parts"]["throughput"]["status"] == "not run"


def test_without_a_gpu_it_stops_at_once(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = ["make", "gpu-check", f"PYTHON={sys.executable}", f"GPU_CHECK_ARGS=--out {out}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode and "jax finds no GPU" in done.stdout
    report = json.loads(out.read_text())
    assert report["failed"] == ["device"] and list(report["parts"]) == ["device"]
