"""The driver of the peers, with scripts that speak their protocol, or fail to."""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as peers_main
from benchmarks.peers.peers import BASELINE, PEERS, Peer, command, environment
from benchmarks.peers.process import PeerError, PeerProcess, Run
from benchmarks.peers.report import markdown, results
from benchmarks.peers.rounds import Load, Measured, measure

LOAD = Load(prompts=[3, 4], outputs=[5, 2])
# Its speed and its tokens are arguments; what is in {} replaces a line of it.
FAKE = """
import json, sys, time
def say(**answer):
    print(json.dumps(answer), flush=True)
seconds, token = float(sys.argv[1]), int(sys.argv[2])
say(seconds=1.5, dtype="float32", version="1.0", threads=2, notes={notes})
runs = 0
for line in sys.stdin:
    words = line.split()
    if words[0] == "run1":
        say(seconds_per_token=seconds / 10, token_ids=[[token] * 64])
        continue
    runs += 1
    {on_run}
    count = int(words[1])
    lengths = [5, 2][:count]
    say(seconds=seconds, prompt_tokens=sum([3, 4][:count]), token_ids={token_ids})
"""
SPIN = "import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()"
WHOLE = {"notes": "[]", "on_run": "pass", "token_ids": "[[7] * (n - 1) + [token] for n in lengths]"}


def fake(folder: Path, name: str, seconds: float = 2.0, token: int = 7, **lines: str) -> Any:
    """How to start a peer that takes `seconds` for everything, and whose every output ends in `token`."""
    script = folder / f"{name}.py"
    script.write_text(FAKE.format(**WHOLE | lines))
    line = [sys.executable, str(script), str(seconds), str(token)]
    return partial(PeerProcess, line, {}, folder, folder / f"{name}.log", 20.0)


def ours_and(folder: Path, repeats: int = 2, requests: int = 2, **lines: str) -> dict[str, Measured]:
    starts = {BASELINE: fake(folder, BASELINE), "other": fake(folder, "other", **lines)}
    return measure(starts, {BASELINE: 2, "other": requests}, LOAD, repeats, say=lambda line: None)


def failure(folder: Path, **lines: str) -> str:
    """What stopped the other peer; ours is measured whole, whatever happened, and the table says it."""
    measured = ours_and(folder, **lines)
    assert measured[BASELINE].failure is None and len(measured[BASELINE].rates[2]) == 2
    found = measured["other"].failure
    assert found is not None and found in table(measured) and "Traceback" not in found and "\n" not in found
    return found


def table(measured: dict[str, Measured], **missing: str) -> str:
    return markdown(
        {
            "machine": {"processor": "a CPU", "cores": 2, "date": "2026-01-02T03:04:05", "commit": "abc"},
            "workload": {"requests": 2, "prompt_tokens": 7, "output_tokens": 7},
            "model": "a model",
            "repeats": 2,
            **results(measured, missing, LOAD),
        }
    )


def test_a_peer_beside_ours(tmp_path: Path) -> None:
    starts = {BASELINE: fake(tmp_path, BASELINE, 2.0), "other": fake(tmp_path, "other", 1.0, token=8)}
    said: list[str] = []
    measured = measure(starts, {BASELINE: 2, "other": 2}, LOAD, 2, said.append)
    ours, other = results(measured, {}, LOAD)["rows"]
    assert ours["output_tokens_per_second"] == [3.5, 3.5] and other["output_tokens_per_second"] == [7.0, 7.0]
    assert ours["ratios"] == [1.0, 1.0] and other["ratios"] == [2.0, 2.0]
    assert other["seconds_per_token"] == [0.1, 0.1]
    assert ours["agreement"] == {"tokens": 7, "requests": 2} and other["agreement"] == {"tokens": 5, "requests": 0}
    assert "| other | 1.0 | float32 | 2 | 2 | 7.0 (7.0-7.0) | 2.00 | 100.0 (100.0-100.0) | 5 of 7 (0) |" in table(
        measured
    )
    runs = [line.split(",")[0] for line in said if "requests" in line]
    assert runs == [BASELINE, "other", "other", BASELINE]


def test_a_shortened_load_is_compared_with_ours_of_the_same(tmp_path: Path) -> None:
    rows = results(ours_and(tmp_path, requests=1), {}, LOAD)["rows"]
    assert [(row["peer"], row["requests"], row["output_tokens"]) for row in rows] == [
        (BASELINE, 2, 7), (BASELINE, 1, 5), ("other", 1, 5),
    ]  # fmt: skip
    assert rows[2]["ratios"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ({"on_run": "raise ValueError('no such operator')"}, "ended with status 1: ValueError: no such operator"),
        ({"on_run": "sys.exit(3)"}, "ended with status 3"),
        ({"on_run": "print('loading model', flush=True); continue"}, "answered 'loading model'"),
        ({"on_run": "print('[1, 2', flush=True); continue"}, "answered '[1, 2'"),
        ({"on_run": "say(seconds=1.0); continue"}, "missing required field"),
        ({"token_ids": "[[token] * 5]"}, "answered 1 requests, not 2"),
        ({"token_ids": "[[token] * 5, [token]]"}, "gave 1 output tokens to request 1, not 2"),
        ({"token_ids": "[[token] * 5, ['a', 'b']]"}, "which is no Run"),
        ({"on_run": "words[1] = 1", "token_ids": "[[token] * 5, [token] * 2]"}, "given 3 prompt tokens, not 7"),
        ({"on_run": "seconds = 0"}, "took 0"),
    ],
)
def test_a_peer_that_fails_is_a_note(tmp_path: Path, lines: dict[str, str], reason: str) -> None:
    assert reason in failure(tmp_path, **lines)


def test_a_peer_that_cannot_load(tmp_path: Path) -> None:
    assert "start: ended with status 1: NameError" in failure(tmp_path, notes="torch.version")


def test_what_a_peer_did_before_it_failed_stays(tmp_path: Path) -> None:
    measured = ours_and(tmp_path, on_run="if runs == 2: sys.exit('out of memory')")
    assert measured["other"].failure == "round 2 of 2: ended with status 1: out of memory"
    assert results(measured, {}, LOAD)["rows"][1]["ratios"] == [1.0]


def test_a_peer_that_never_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()"]
    process = PeerProcess(command, {}, tmp_path, tmp_path / "log", timeout=0.2)
    with process, pytest.raises(PeerError, match=r"no answer within 0\.2 s"):
        process.read(Run)


def test_a_peer_that_cannot_be_started(tmp_path: Path) -> None:
    start = partial(PeerProcess, [str(tmp_path / "python")], {}, tmp_path, tmp_path / "log", 1.0)
    measured = measure({"other": start}, {"other": 2}, LOAD, 1, say=lambda line: None)
    assert "cannot be started" in (measured["other"].failure or "")
    assert "cannot be started" in table(measured)


def all_ended(pids: list[int]) -> bool:
    """Within some time: a killed process needs a moment, and whoever inherits it has to look at it."""
    for _ in range(200):
        stats = [Path(f"/proc/{pid}/stat") for pid in pids]
        try:
            if all(stat.read_text().rpartition(")")[2].split()[0] == "Z" for stat in stats if stat.exists()):
                return True
        except OSError:
            pass  # it went between the two looks
        time.sleep(0.05)
    return False


def test_closing_ends_what_a_peer_left_running(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    process = PeerProcess([sys.executable, "-c", code], {}, tmp_path, tmp_path / "log", 20.0)
    left = int(process._read_line())
    process.close()
    assert all_ended([left])


def test_a_peer_that_computes_while_it_should_wait_is_noted(tmp_path: Path) -> None:
    starts = {BASELINE: fake(tmp_path, BASELINE, on_run="time.sleep(0.5)"), "other": fake(tmp_path, "other")}
    script = tmp_path / "other.py"
    script.write_text(f"{SPIN}\n{script.read_text()}")
    text = table(measure(starts, {BASELINE: 2, "other": 2}, LOAD, 1, say=lambda line: None))
    assert "- other: used up to" in text and f"- {BASELINE}: used" not in text


def test_a_busy_machine_is_noted(tmp_path: Path) -> None:
    starts = {BASELINE: fake(tmp_path, BASELINE, on_run="time.sleep(0.5)"), "other": fake(tmp_path, "other")}
    with PeerProcess([sys.executable, "-c", f"{SPIN}\ninput()"], {}, tmp_path, tmp_path / "busy.log", 1.0):
        text = table(measure(starts, {BASELINE: 2, "other": 2}, LOAD, 1, say=lambda line: None))
    assert f"- {BASELINE}: while it worked, other programs used up to" in text


def test_what_is_not_installed_is_said(tmp_path: Path) -> None:
    measured = measure({BASELINE: fake(tmp_path, BASELINE)}, {BASELINE: 2}, LOAD, 1, say=lambda line: None)
    assert "- vllm: not installed" in table(measured, vllm="not installed")


def test_notes_of_a_peer_are_in_the_table(tmp_path: Path) -> None:
    assert "- other: patched" in table(ours_and(tmp_path, notes="['patched']"))


def test_the_protocol_of_the_scripts(tmp_path: Path) -> None:
    """`engines/protocol.py` with an engine that writes to standard output, too."""
    (tmp_path / "engine.py").write_text(
        "from benchmarks.peers.engines.protocol import Engine, serve\n"
        "def load(model, dtype):\n"
        "    print('loading', model)\n"
        "    return Engine(lambda prompts, lengths: [[9] * n for n in lengths], {'version': '2', 'threads': 1})\n"
        "serve(load)\n"
    )
    requests = [{"prompt_token_ids": [5] * length, "max_tokens": most} for length, most in ((3, 5), (4, 2))]
    (tmp_path / "workload.json").write_text(json.dumps({"requests": requests}))
    line = [sys.executable, str(tmp_path / "engine.py"), str(tmp_path / "workload.json"), "model", "bfloat16"]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    start = partial(PeerProcess, line, env, tmp_path, tmp_path / "log", 20.0)
    measured = measure({"other": start}, {"other": 2}, LOAD, 1, say=lambda line: None)["other"]
    assert measured.failure is None and measured.token_ids == {2: [[9] * 5, [9] * 2]} and len(measured.decodes) == 1
    assert measured.ready is not None and measured.ready.dtype == "bfloat16"
    assert "loading model" in (tmp_path / "log").read_text()


def test_requests_for_all_and_for_one() -> None:
    names = [BASELINE, "vllm", "transformers"]
    assert peers_main._requests([], names, 64) == dict.fromkeys(names, 64)
    assert peers_main._requests(["transformers=8"], names, 64) == {BASELINE: 64, "vllm": 64, "transformers": 8}
    assert peers_main._requests(["16", "vllm=8"], names, 64) == {BASELINE: 16, "vllm": 8, "transformers": 16}


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--requests", "65"], "from 1 to 64"),
        (["--requests", "vllm=x"], "from 1 to 64"),
        (["--peers", "vllm", "--requests", "transformers=8"], "'transformers' is none of the peers"),
        (["--json", "nowhere/a.json"], "no folder nowhere"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers_main.main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and reason in error and error.count("\n") == 1


def test_the_environment_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGED_PEERS", "/peers")
    peer = Peer("other", "vllm", "vllm", "bfloat16", env={"LD_PRELOAD": "{venv}/lib/x.so"})
    assert command(peer, Path("w"), Path("m"))[0] == "/peers/vllm/bin/python"
    assert environment(peer)["LD_PRELOAD"] == "/peers/vllm/lib/x.so"
    assert all((Path(peers_main.__file__).parent / "engines" / f"{peer.module}.py").exists() for peer in PEERS.values())
