"""The trace events: what the scheduler did, one frozen struct per line of a trace.

`step` counts engine steps from 0; `time_us` is microseconds since the engine started, 0 where unknown. Lengths and
counts are in tokens unless the name says blocks or slots. `seq` is the request's ID.
"""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Phase = Literal["PRE-FILL", "DECODE"]
WaitingReason = Literal["slots", "blocks", "tokens", "queue_order"]


class _Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event"):
    step: Count = 0
    time_us: Count = 0


class Added(_Event, frozen=True, tag="added"):
    """A request came; `step` is the first step that could see it."""

    seq: Count
    prompt_len: Count
    max_tokens: Count


class Refused(_Event, frozen=True, tag="refused"):
    """A request that was added can never run; `reason` is one line with both numbers."""

    seq: Count
    prompt_len: Count
    reason: str


class Cancelled(_Event, frozen=True, tag="cancelled"):
    """A request was taken back before it finished; `step` is the first step without it."""

    seq: Count
    prompt_len: Count
    total_len: Count


class Preempted(_Event, frozen=True, tag="preempted"):
    """A running sequence went back to waiting and released its `released` blocks."""

    seq: Count
    total_len: Count
    released: Count


class CacheHit(_Event, frozen=True, tag="cache_hit"):
    """A sequence admitted in this step takes `tokens` tokens from the prefix cache."""

    seq: Count
    tokens: Count


class Waiting(_Event, frozen=True, tag="waiting"):
    """A request was not admitted: it needs `needs` of what `reason` names and `free` are left.

    `queue_order` (`ahead` > 0) counts blocks. `ahead` is the number of waiting requests before it.
    """

    seq: Count
    reason: WaitingReason
    needs: Count
    free: Count
    ahead: Count


class Finished(_Event, frozen=True, tag="finished"):
    """A sequence ended in this step; `total_len` counts its last token. `finish_reason` is None where unknown."""

    seq: Count
    prompt_len: Count
    total_len: Count
    finish_reason: str | None


class Scheduled(_Event, frozen=True, tag="scheduled"):
    """A sequence runs in this step; values are those before it runs, its blocks already handed out."""

    seq: Count
    phase: Phase
    prompt_len: Count
    total_len: Count
    num_blocks: Count
    cached: Count
    scheduled: Count
    blocks: tuple[Count, ...]


Event = Added | Refused | Cancelled | Preempted | CacheHit | Waiting | Finished | Scheduled
