"""The state of a check: what the events so far tell, and each rule in its own method."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule (see `check.py`): where, what the rule expects and what was found."""

    step: int
    seq: int
    rule: str
    expected: object
    found: object
    message: str


@dataclass(slots=True)
class _Sequence:
    """What the events so far tell about one sequence; None is unknown (the trace started later)."""

    prompt_len: int | None = None
    total_len: int | None = None
    max_tokens: int | None = None
    cached: int | None = None
    state: str | None = None  # "waiting", "running" or the event that ended it
    prefilling: bool | None = None
    hit: int = 0
    hit_step: int | None = None
    blocks: tuple[int, ...] = ()
    scheduled_step: int | None = None
    sampled_step: int | None = None


@dataclass(slots=True)
class Checker:
    """Sees the events in order and collects the violations; a limit of None is not checked."""

    block_size: int
    num_blocks: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    complete: bool
    enable_prefix_caching: bool
    violations: list[Violation] = field(default_factory=list)
    sequences: defaultdict[int, _Sequence] = field(default_factory=lambda: defaultdict(_Sequence))
    waiting: list[int] = field(default_factory=list)  # IDs, sorted
    running: set[int] = field(default_factory=set)
    holders: dict[int, set[int]] = field(default_factory=dict)  # block -> sequences
    newest_added: int | None = None
    step: int = 0
    place: tuple[int, float] = (0, -1)  # of the last event in its step: kind, ID
    step_tokens: int = 0
    step_seqs: int = 0
    step_preempts: bool = False

    def expect(self, holds: bool, event: Event, rule: str, expected: object, found: object, what: str) -> None:
        if not holds:
            message = f"step {event.step} seq {event.seq}: {what}: expected {expected}, found {found}"
            self.violations.append(Violation(event.step, event.seq, rule, expected, found, message))

    def equal(self, event: Event, rule: str, expected: object, found: object, what: str) -> None:
        """Expects equality where the expected value is known."""
        self.expect(expected is None or expected == found, event, rule, expected, found, what)

    def see(self, event: Event) -> None:
        self.see_order(event)
        sequence = self.sequences[event.seq]
        if not isinstance(event, Added):
            self.see_alive(event, sequence)
        match event:
            case Added():
                self.see_added(event, sequence)
            case Scheduled():
                self.see_scheduled(event, sequence)
            case Preempted():
                self.see_preempted(event, sequence)
            case CacheHit():
                self.see_cache_hit(event, sequence)
            case Waiting():
                self.see_waiting(event, sequence)
            case Refused() | Cancelled() | Finished():
                self.see_end(event, sequence)

    def see_order(self, event: Event) -> None:
        self.expect(event.step >= self.step, event, "step_order", f"step >= {self.step}", event.step, "step")
        if event.step != self.step:
            self.step, self.place = event.step, (0, -1)
            self.step_tokens = self.step_seqs = 0
            self.step_preempts = False
        if place := _place(event):
            self.expect(place >= self.place, event, "step_order", f"at or after {self.place}", place, "order of lines")
            self.place = place

    def see_alive(self, event: Event, sequence: _Sequence) -> None:
        known = sequence.state is not None or not self.complete
        self.expect(known, event, "lifecycle", "ADDED first", type(event).__name__, "sequence")
        ended = sequence.state not in (None, "waiting", "running")
        self.expect(not ended, event, "lifecycle", f"nothing after {sequence.state}", type(event).__name__, "sequence")

    def see_added(self, event: Added, sequence: _Sequence) -> None:
        self.expect(sequence.state is None, event, "lifecycle", "one ADDED", "another", "sequence")
        expected = (0 if self.complete else event.seq) if self.newest_added is None else self.newest_added + 1
        self.equal(event, "lifecycle", expected, event.seq, "IDs count up")
        self.expect(event.prompt_len >= 1, event, "prompt_len", ">= 1", event.prompt_len, "prompt_len")
        self.expect(event.max_tokens >= 1, event, "max_tokens", ">= 1", event.max_tokens, "max_tokens")
        self.newest_added = event.seq
        sequence.prompt_len, sequence.max_tokens = event.prompt_len, event.max_tokens
        self.wait(event.seq, sequence, event.prompt_len)

    def wait(self, seq: int, sequence: _Sequence, total_len: int) -> None:
        self.let_go(seq, sequence)
        sequence.state, sequence.total_len, sequence.cached, sequence.hit = "waiting", total_len, 0, 0
        insort(self.waiting, seq)

    def let_go(self, seq: int, sequence: _Sequence) -> None:
        """Takes a sequence off the running and the waiting, and its blocks from it."""
        self.hold(seq, sequence, ())
        self.running.discard(seq)
        at = bisect_left(self.waiting, seq)
        if self.waiting[at : at + 1] == [seq]:
            del self.waiting[at]

    def hold(self, seq: int, sequence: _Sequence, blocks: tuple[int, ...]) -> set[int]:
        """Makes `blocks` those that the sequence holds; returns the ones that it did not hold before."""
        old, new = set(sequence.blocks), set(blocks)
        for block in old - new:
            self.holders[block].discard(seq)
            if not self.holders[block]:
                del self.holders[block]
        for block in new - old:
            self.holders.setdefault(block, set()).add(seq)
        sequence.blocks = blocks
        return new - old

    def see_preempted(self, event: Preempted, sequence: _Sequence) -> None:
        unseen = sequence.state is None  # a trace that starts later does not show what it held
        self.expect(unseen or event.seq in self.running, event, "lifecycle", "running", sequence.state, "PREEMPTED")
        newest = max(self.running | {event.seq})
        self.equal(event, "fcfs", newest, event.seq, "the newest running is preempted")
        self.equal(event, "total_len", sequence.total_len, event.total_len, "total_len")
        held = None if unseen else len(sequence.blocks)
        self.equal(event, "blocks", held, event.released, "released")
        self.step_preempts = True
        self.wait(event.seq, sequence, event.total_len)

    def see_cache_hit(self, event: CacheHit, sequence: _Sequence) -> None:
        self.expect(sequence.state != "running", event, "lifecycle", "waiting", sequence.state, "CACHE HIT")
        most = event.tokens if sequence.total_len is None else sequence.total_len - 1
        self.expect(1 <= event.tokens <= most, event, "cached", f"1 to {most}", event.tokens, "tokens of a cache hit")
        self.equal(event, "cached", 0, event.tokens % self.block_size, "tokens of a cache hit beyond whole blocks")
        sequence.hit, sequence.hit_step = event.tokens, event.step

    def see_scheduled(self, event: Scheduled, sequence: _Sequence) -> None:
        self.see_budget(event, sequence)
        if event.seq not in self.running:
            self.see_admission(event, sequence)
        if sequence.prefilling is not None:
            phase = "PRE-FILL" if sequence.prefilling else "DECODE"
            self.equal(event, "phase", phase, event.phase, "phase")
        self.equal(event, "prompt_len", sequence.prompt_len, event.prompt_len, "prompt_len")
        self.equal(event, "total_len", sequence.total_len, event.total_len, "total_len")
        self.equal(event, "cached", sequence.cached, event.cached, "cached")
        self.see_lengths(event, sequence)
        self.see_blocks(event, sequence)
        consumed = event.cached + event.scheduled
        sampled = consumed == event.total_len
        sequence.prompt_len, sequence.cached, sequence.total_len = event.prompt_len, consumed, event.total_len + sampled
        sequence.prefilling = not sampled if event.phase == "PRE-FILL" else False
        sequence.scheduled_step = event.step
        sequence.sampled_step = event.step if sampled else None

    def see_budget(self, event: Scheduled, sequence: _Sequence) -> None:
        self.expect(sequence.scheduled_step != event.step, event, "once", "once a step", "twice", "scheduled")
        self.step_tokens += event.scheduled
        self.step_seqs += 1
        most = self.max_num_batched_tokens or self.step_tokens
        self.expect(self.step_tokens <= most, event, "budget", f"<= {most}", self.step_tokens, "tokens of the step")
        most = self.max_num_seqs or self.step_seqs
        self.expect(self.step_seqs <= most, event, "budget", f"<= {most}", self.step_seqs, "sequences of the step")

    def see_admission(self, event: Scheduled, sequence: _Sequence) -> None:
        if sequence.state == "waiting":
            self.equal(event, "fcfs", self.waiting[0], event.seq, "the oldest waiting is admitted")
            self.expect(not self.step_preempts, event, "fcfs", "none after PREEMPTED", event.seq, "admission")
        if sequence.state is not None or sequence.hit:
            hit_now = sequence.hit_step in (None, event.step)
            self.expect(hit_now, event, "cached", f"admission in step {sequence.hit_step}", event.step, "CACHE HIT")
            sequence.cached, sequence.prefilling = sequence.hit, True
        self.let_go(event.seq, sequence)
        self.running.add(event.seq)
        sequence.state, sequence.hit_step = "running", None
        most = self.max_num_seqs or len(self.running)
        self.expect(len(self.running) <= most, event, "budget", f"<= {most}", len(self.running), "running sequences")

    def see_lengths(self, event: Scheduled, sequence: _Sequence) -> None:
        rest = event.total_len - event.cached
        if event.phase == "DECODE":
            self.equal(event, "scheduled", (1, 1), (rest, event.scheduled), "(total_len - cached, scheduled) in decode")
        else:
            holds = 1 <= event.scheduled <= rest
            self.expect(holds, event, "scheduled", f"1 to {rest}", event.scheduled, "scheduled in prefill")
        generated = event.total_len - event.prompt_len
        self.expect(generated >= 0, event, "total_len", f">= {event.prompt_len}", event.total_len, "total_len")
        most = generated if sequence.max_tokens is None else sequence.max_tokens - 1
        self.expect(generated <= most, event, "max_tokens", f"<= {most}", generated, "generated before the step")
        most = self.max_model_len - 1 if self.max_model_len else event.total_len
        self.expect(event.total_len <= most, event, "max_tokens", f"<= {most}", event.total_len, "total_len")

    def see_blocks(self, event: Scheduled, sequence: _Sequence) -> None:
        blocks = event.blocks
        self.equal(event, "num_blocks", _ceil_div(event.total_len, self.block_size), event.num_blocks, "num_blocks")
        self.equal(event, "num_blocks", event.num_blocks, len(blocks), "length of blocks")
        if blocks == sequence.blocks:
            return
        self.equal(event, "blocks", sequence.blocks, blocks[: len(sequence.blocks)], "blocks held before")
        self.expect(len(set(blocks)) == len(blocks), event, "blocks", "distinct IDs", blocks, "blocks")
        outside = [block for block in blocks if self.num_blocks is not None and block >= self.num_blocks]
        self.expect(not outside, event, "blocks", f"IDs < {self.num_blocks}", outside, "blocks")
        new = self.hold(event.seq, sequence, blocks)
        for at, block in enumerate(blocks):
            if block in new:
                for other in sorted(self.holders[block] - {event.seq}):
                    self.see_sharing(event, sequence, at, block, other)

    def see_sharing(self, event: Scheduled, sequence: _Sequence, at: int, block: int, other: int) -> None:
        prefix = sequence.blocks[: at + 1]
        same = self.sequences[other].blocks[: at + 1] == prefix
        hit = max(sequence.hit, self.sequences[other].hit)
        holds = same and hit >= (at + 1) * self.block_size
        expected = f"no sharing with seq {other} beyond a common cache hit"
        self.expect(holds, event, "sharing", expected, f"block {block} at position {at}", "blocks")

    def see_waiting(self, event: Waiting, sequence: _Sequence) -> None:
        self.expect(sequence.state != "running", event, "lifecycle", "waiting", sequence.state, "WAITING")
        head = event.reason != "queue_order"
        self.expect(head == (event.ahead == 0), event, "waiting", "ahead=0 but for queue_order", event.ahead, "ahead")
        if self.complete:
            self.equal(event, "waiting", bisect_left(self.waiting, event.seq), event.ahead, "ahead")
        needs, free = self.needs_and_free(event.reason, sequence.total_len)
        if needs is not None and self.may_hit(event.reason):
            self.expect(1 <= event.needs <= needs, event, "waiting", f"1 to {needs}", event.needs, "needs")
        else:
            self.equal(event, "waiting", needs, event.needs, f"needs ({event.reason})")
        self.equal(event, "waiting", free, event.free, f"free ({event.reason})")
        if head:
            self.equal(event, "waiting", self.first_reason(event, sequence.total_len), event.reason, "reason")
            self.expect(event.needs > event.free, event, "waiting", "needs > free", event.needs, "needs")

    def may_hit(self, reason: str) -> bool:
        """Whether what a sequence needs may be less than its whole length says, by what the prefix cache has of it."""
        return self.enable_prefix_caching and reason in ("blocks", "tokens")

    def first_reason(self, event: Waiting, total_len: int | None) -> str | None:
        """The first reason of `slots`, `blocks`, `tokens` that holds; None where the events do not tell."""
        for reason in ("slots", "blocks", "tokens"):
            needs, free = self.needs_and_free(reason, total_len)
            if needs is None or free is None:
                return None
            if self.may_hit(reason):
                if reason != event.reason:
                    continue
                needs = event.needs
            if needs > free and (reason != "tokens" or free == 0):
                return reason
        return "none"

    def needs_and_free(self, reason: str, total_len: int | None) -> tuple[int | None, int | None]:
        """What a WAITING line must say, each None where the events do not tell."""
        if reason == "slots":
            slots = self.max_num_seqs if self.complete else None
            return 1, None if slots is None else slots - len(self.running)
        if reason == "tokens":
            budget = self.max_num_batched_tokens
            return total_len, None if budget is None else budget - self.step_tokens
        needs = None if total_len is None else _ceil_div(total_len, self.block_size)
        pool = self.num_blocks if self.complete else None
        return needs, None if pool is None else pool - len(self.holders)

    def see_end(self, event: Refused | Cancelled | Finished, sequence: _Sequence) -> None:
        self.equal(event, "prompt_len", sequence.prompt_len, event.prompt_len, "prompt_len")
        if isinstance(event, Refused):
            self.expect(sequence.state in (None, "waiting"), event, "lifecycle", "waiting", sequence.state, "REFUSED")
        else:
            self.equal(event, "total_len", sequence.total_len, event.total_len, "total_len")
        if isinstance(event, Finished):
            self.see_finished(event, sequence)
        self.let_go(event.seq, sequence)
        sequence.state = type(event).__name__.upper()

    def see_finished(self, event: Finished, sequence: _Sequence) -> None:
        self.expect(sequence.state in (None, "running"), event, "lifecycle", "running", sequence.state, "FINISHED")
        if sequence.state is not None:
            self.expect(
                sequence.sampled_step == event.step, event, "total_len", "a token in this step", "none", "FINISHED"
            )
        generated = event.total_len - event.prompt_len
        most = generated if sequence.max_tokens is None else sequence.max_tokens
        self.expect(1 <= generated <= most, event, "max_tokens", f"1 to {most}", generated, "generated")
        most_total = self.max_model_len or event.total_len
        self.expect(event.total_len <= most_total, event, "max_tokens", f"<= {most_total}", event.total_len, "total")
        if event.finish_reason == "length" and sequence.max_tokens is not None and self.max_model_len:
            end = min(event.prompt_len + sequence.max_tokens, self.max_model_len)
            self.equal(event, "max_tokens", end, event.total_len, "total of a finish for length")

    def end(self) -> None:
        if not self.complete:
            return
        for seq, sequence in self.sequences.items():
            if sequence.state in (None, "waiting", "running"):
                expected = "FINISHED, CANCELLED or REFUSED"
                message = f"seq {seq}: still {sequence.state} at the end: expected {expected}"
                self.violations.append(Violation(self.step, seq, "lifecycle", expected, sequence.state, message))


def _place(event: Event) -> tuple[int, float] | None:
    """Where in its step a line stands: its kind, then its order among that kind. None: anywhere."""
    match event:
        case Added() | Refused():
            return (0, event.seq)
        case Preempted():
            return (1, -event.seq)
        case CacheHit():
            return (2, event.seq)
        case Scheduled():
            return (3 if event.phase == "PRE-FILL" else 4, event.seq)
        case Waiting():
            return (5, event.seq)
        case Finished():
            return (6, event.seq)
        case Cancelled():
            return None


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
