"""`python -m jaxpaged.generate` as a process: output, a reader that goes away, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpaged.trace import check_events, read_jsonl
from tests.test_generate import SUMMARY
from tests.tiny_llm import WITHOUT_TOKENIZER

# `python -m jaxpaged.generate`, but what a shell starts in the background ignores Control-C, and hands that on.
PROGRAM = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jaxpaged.generate", run_name="__main__", alter_sys=True)
"""
SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "4", "--block-size", "16", "--num-blocks", "16"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """What one of the started programs compiles, the next ones find here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(tmp_path, cache) -> Callable[..., subprocess.Popen[str]]:
    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, "--model", str(WITHOUT_TOKENIZER), *SMALL, *arguments]
        root = str(Path(__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": root, "JAX_COMPILATION_CACHE_DIR": str(cache)}
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, stdin=none, stdout=pipe, stderr=pipe)

    return start


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stderr
    for line in process.stderr:
        if line.startswith("ready after"):
            return
    raise AssertionError("it ended before it was ready")


def test_the_program(start, tmp_path) -> None:
    """A real model folder, a real process: ids in, a trace in a file, ids out."""
    process = start("--max-tokens", "20", "--ignore-eos", "--trace", "t.jsonl", "--", "1 2 3", "7 7 7 7 7")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    # The greedy tokens of the golden model.
    assert "[0] 1 2 3\n65 25 65 65 65 65 65 127 65 " in out and "[1] 7 7 7 7 7\n4 4 4 4 4 4 4 " in out
    assert SUMMARY.fullmatch(err.splitlines()[-1])
    events = list(read_jsonl((tmp_path / "t.jsonl").read_text().splitlines()))
    assert check_events(events, block_size=16, num_blocks=16, max_num_seqs=2, complete=True) == []


def test_the_reader_goes_away(start) -> None:
    """As in `| head -1`: no traceback, and nothing at exit."""
    process = start("--max-tokens", "100", "--ignore-eos", "1 2 3")
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.wait(timeout=300) == 141
    assert process.stderr.read().splitlines()[-1].startswith("ready after")


def test_control_c(start, tmp_path) -> None:
    (tmp_path / "prompts").write_text("1 2 3\n" * 5000)
    process = start("--max-tokens", "100", "--ignore-eos", "--file", "prompts")
    wait_until_ready(process)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "") and "Traceback" not in err and "error" not in err
