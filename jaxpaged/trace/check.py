"""The checker: what always holds in a trace, told from its events alone.

Rules, by the name a `Violation` carries:

- `step_order`   steps never go back; in a step: ADDED and REFUSED, PREEMPTED newest first, CACHE HIT, PRE-FILL, DECODE,
                 WAITING, FINISHED, each of the last four by ID (CANCELLED stands anywhere).
- `lifecycle`    IDs count up; each ID is added once, ends once, and has no event after its end; only a running
                 sequence decodes, is preempted or finishes; only a waiting one is refused, waits or hits the cache.
- `once`         a sequence is scheduled at most once a step.
- `phase`        the first step after admission is PRE-FILL, and so are the next until every token was consumed.
- `prompt_len`   never changes.
- `total_len`    grows by one with each step that consumed the last token, and by nothing else; adds up at the end.
- `max_tokens`   nothing runs beyond max_tokens or max_model_len; a finish for `length` is exactly there.
- `cached`       grows by `scheduled`; starts from the cache hit, else 0. A hit is whole blocks, and leaves one token to
                 compute.
- `scheduled`    1 in decode, where `total_len - cached` is 1; in prefill from 1 to the rest.
- `num_blocks`   equals `ceil(total_len / block_size)` and the length of the list.
- `blocks`       IDs are distinct and of the pool; a running sequence keeps its blocks; PREEMPTED releases all of them.
- `sharing`      two running sequences hold one block only as part of a whole prefix that one took as a cache hit.
- `budget`       a step's tokens and sequences are within max_num_batched_tokens and max_num_seqs.
- `fcfs`         nobody overtakes: the oldest waiting is admitted, the newest running is preempted, and a step that
                 preempts admits nobody.
- `waiting`      a WAITING line's reason, needs, free and ahead are those that the other events tell.
"""

from collections.abc import Iterable

from jaxpaged.trace.checker import Checker, Violation
from jaxpaged.trace.events import Event

__all__ = ["Violation", "check_events"]


def check_events(
    events: Iterable[Event],
    *,
    block_size: int,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    complete: bool = False,
    enable_prefix_caching: bool = True,
) -> list[Violation]:
    """All violations, in the order of the events; an empty list for a sound trace.

    A limit that is None is not checked. With `complete`, the events are those of a whole run: IDs start at 0, every
    sequence was added and every added one has ended. Without it a trace may start and stop anywhere. With
    `enable_prefix_caching` a waiting sequence may need less than its length says.
    """
    limits = dict(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")
    checker = Checker(
        block_size, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len, complete, enable_prefix_caching
    )
    for event in events:
        checker.see(event)
    checker.end()
    return checker.violations
