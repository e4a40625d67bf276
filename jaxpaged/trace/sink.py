"""Where trace events go while an engine runs: text to a stream or file, JSON lines to a file, or a function."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from jaxpaged.trace.events import Event
from jaxpaged.trace.jsonl import write_jsonl
from jaxpaged.trace.text import TextFormatter


class TextSink:
    """Writes the text form, a part of a step at a time."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._formatter = TextFormatter()

    def __call__(self, event: Event) -> None:
        self._write(self._formatter.add(event))

    def flush(self) -> None:
        self._write(self._formatter.end())
        self._file.flush()

    def _write(self, lines: list[str]) -> None:
        self._file.writelines(f"{line}\n" for line in lines)


class JsonlSink:
    """Writes JSON lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, event: Event) -> None:
        write_jsonl([event], self._file)

    def flush(self) -> None:
        self._file.flush()


class FunctionSink:
    """Calls a function of the user's."""

    def __init__(self, function: Callable[[Event], None]) -> None:
        self._function = function

    def __call__(self, event: Event) -> None:
        self._function(event)

    def flush(self) -> None:
        pass


Sink = TextSink | JsonlSink | FunctionSink


def open_sink(trace: bool | str | Path | Callable[[Event], None]) -> Sink | None:
    """True: text to standard error; a path: a new file there, JSON lines if it ends in .jsonl; a function: called with
    each event. False: None.

    Raises OSError if the file cannot be written, ValueError for anything else.
    """
    if trace is False:
        return None
    if trace is True:
        return TextSink(sys.stderr)
    if isinstance(trace, str | Path):
        # Stays open as long as its engine: both end together.
        try:
            file = Path(trace).open("w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise OSError(f"trace: {trace} cannot be written: {error.strerror}") from error
        return JsonlSink(file) if Path(trace).suffix == ".jsonl" else TextSink(file)
    if callable(trace):
        return FunctionSink(trace)
    raise ValueError(f"trace must be True, False, a path or a function, not {trace!r}")
