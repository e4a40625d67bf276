"""A peer as a process that is asked by lines (`engines/protocol.py`), and what its answers must be."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from benchmarks.peers.cpu import session_seconds

_CLOSE_SECONDS = 10.0
_MOST_SHOWN = 200  # characters of what a peer said


class PeerError(Exception):
    """Why a peer has no figure, in one line."""


class Ready(msgspec.Struct, frozen=True):
    """seconds: to load. threads: that compute. notes: what a reader must know of how it was run."""

    seconds: float
    dtype: str
    version: str
    threads: int
    notes: list[str] = []


class Run(msgspec.Struct, frozen=True):
    seconds: float
    prompt_tokens: int
    token_ids: list[list[int]]


class Run1(msgspec.Struct, frozen=True):
    seconds_per_token: float
    token_ids: list[list[int]]


Answer = TypeVar("Answer", Ready, Run, Run1)


class PeerProcess:
    """Runs until `close`, in a session of its own. What it says on standard error goes to the file `log`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path, timeout: float) -> None:
        self._log, self._timeout, self._unread = log, timeout, b""
        with log.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    command, cwd=folder, env=env, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                )  # fmt: skip
            except OSError as error:
                raise PeerError(f"cannot be started: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, line: str, kind: type[Answer]) -> Answer:
        """The answer to one line. Raises PeerError if there is none, or another than this kind."""
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self.read(kind)

    def read(self, kind: type[Answer]) -> Answer:
        """The next line that it says. Raises PeerError as `ask` does."""
        line = self._read_line()
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise PeerError(f"answered {_short(line)!r}, which is no {kind.__name__}: {error}") from error

    def cpu_seconds(self) -> float | None:
        """What all its processes have used so far; None where that is not known."""
        return session_seconds(self._process.pid)

    def close(self) -> None:
        """Let it end, then end it. A second call does nothing."""
        assert self._process.stdin and self._process.stdout
        if self._process.stdout.closed:
            return
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(_CLOSE_SECONDS)
        # Whatever it left running: the session is its own.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _read_line(self) -> bytes:
        assert self._process.stdout
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + self._timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerError(f"gave no answer within {self._timeout:g} s")
            piece = os.read(pipe, 2**16)
            if not piece:
                raise self._ended()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> PeerError:
        try:
            status = f"with status {self._process.wait(_CLOSE_SECONDS)}"
        except subprocess.TimeoutExpired:
            status = "its standard output"
        lines = [line for line in self._log.read_bytes().splitlines() if line.strip()]
        return PeerError(f"ended {status}" + (f": {_short(lines[-1])}" if lines else ""))


def _short(line: bytes) -> str:
    text = " ".join(line.decode(errors="replace").split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
