"""The scheduler trace: events, their text and JSONL forms, and the checker of what always holds."""

from jaxpaged.trace.check import Violation, check_events
from jaxpaged.trace.events import (
    Added,
    CacheHit,
    Cancelled,
    Event,
    Finished,
    Preempted,
    Refused,
    Scheduled,
    Waiting,
)
from jaxpaged.trace.jsonl import read_jsonl, write_jsonl
from jaxpaged.trace.sink import open_sink
from jaxpaged.trace.text import format_event, format_events, parse_text

__all__ = [
    "Added",
    "CacheHit",
    "Cancelled",
    "Event",
    "Finished",
    "Preempted",
    "Refused",
    "Scheduled",
    "Violation",
    "Waiting",
    "check_events",
    "format_event",
    "format_events",
    "open_sink",
    "parse_text",
    "read_jsonl",
    "write_jsonl",
]
