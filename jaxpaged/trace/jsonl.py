"""Trace events as JSON lines: one object per event, its kind in the field `event`."""

from collections.abc import Iterable, Iterator
from typing import TextIO

import msgspec

from jaxpaged.trace.events import Event


def write_jsonl(events: Iterable[Event], file: TextIO) -> None:
    """Writes each event as it comes, one line each, to a text file open for writing."""
    encoder = msgspec.json.Encoder()
    for event in events:
        file.write(encoder.encode(event).decode() + "\n")


def read_jsonl(lines: Iterable[str | bytes]) -> Iterator[Event]:
    """Yields the event of each line; blank lines are skipped. Raises ValueError with the number of a bad line."""
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ValueError(f"line {number}: not a trace event: {error}") from error
