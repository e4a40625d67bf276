"""The rules of docs/scheduler.md as plain Python: what the device scheduler is compared with, step by step.

Written from the rules alone. Where they leave room, the oracle reads them so:

- *Step numbers.* A step with nothing waiting and nothing running is no step: `step()` then only reports what was added
  and refused since, with the number of the step that would come next, and does not count.
- *`ADDED` and `REFUSED`* come in the order of `add_request`; a refused request's two lines stand together.
- *Refused for the pool*: the reason reads "needs {blocks} blocks, num_blocks is {num_blocks}"; `max_model_len` is
  tested first.
- *Reasons at a step's end* (a step that preempted, or under `prefill_first` only decoded): at the end of what the step
  decides, after its decodes took their blocks, before its forward, so blocks of the sequences it finishes are not free
  yet. That reason can only be `slots` or `blocks`.
- *`WAITING` is printed again when the reason changes*: being admitted ends a reason, so a request that is preempted and
  waits again prints its line again even when the reason is what it was before admission. A changed number alone prints
  nothing. The lines of a step come in queue order.
- *`needs` of `slots`* is 1. `free` is in all four what admission saw when it ended.
- *The queue* holds every request that was added; places on the device are not counted (they change no decision).
- *The commit* handles the scheduled sequences by ID whatever their phase: `FINISHED` lines and releases are in order.
- *Aborts*: a request leaves at once, so what it held serves the next step; `CANCELLED` comes with `ADDED` and
  `REFUSED`, in the order of the calls.
- *Tokens* are pairs (content, value). `next_token(content, position)` gives the value at index `position` of the
  sequence's buffer, so a sequence that was preempted draws what it would have drawn, and two of one content the same.
- *Cache hits* are looked up when the step begins, for those that wait then; one that is preempted in the step has none.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from jaxpaged.trace import Added, CacheHit, Cancelled, Event, Finished, Preempted, Refused, Scheduled, Waiting
from jaxpaged.trace.events import WaitingReason

Token = tuple[int, int]


@dataclass(frozen=True)
class OracleConfig:
    """The limits, named as in the rules; `max_num_batched_tokens` may be as large as one likes."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    schedule: Literal["mixed", "prefill_first"] = "mixed"
    enable_prefix_caching: bool = True


@dataclass
class Request:
    seq: int
    prompt: tuple[Token, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    content: int
    cache_salt: int = 0
    generated: list[int] = field(default_factory=list)
    cached: int = 0
    prefill_len: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    reason: WaitingReason | None = None  # of the last WAITING line since it was last admitted

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.prompt + tuple((self.content, value) for value in self.generated)

    @property
    def total_len(self) -> int:
        return self.prompt_len + len(self.generated)

    @property
    def prefills(self) -> bool:
        return self.cached < self.prefill_len


class Oracle:
    """`add_request` any time between steps, `step` until `done`.

    `waiting_lines` is "all", or "head" to print WAITING only for the first of the queue.
    """

    def __init__(
        self,
        config: OracleConfig,
        next_token: Callable[[int, int], int],
        waiting_lines: Literal["all", "head"] = "all",
    ) -> None:
        self.config = config
        self.next_token = next_token
        self.waiting_lines = waiting_lines
        self.requests: list[Request] = []
        self.waiting: deque[Request] = deque()  # in order
        self.running: list[Request] = []  # in order
        self.free = deque(range(config.num_blocks))
        self.reserved = 0  # free blocks that the step has promised and not handed out yet
        self.holders = [0] * config.num_blocks
        self.block_of: dict[Key, int] = {}  # the prefix cache
        self.key_of: dict[int, Key] = {}
        self.hits: dict[int, list[int]] = {}  # of the requests that wait when the step begins
        self.step_number = 0
        self.news: list[Event] = []

    @property
    def done(self) -> bool:
        return not (self.waiting or self.running or self.news)

    def pool_state(self) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
        """The queue of free blocks, front first, and the blocks of each running sequence."""
        return tuple(self.free), {request.seq: tuple(request.blocks) for request in self.running}

    # What is refused

    def add_request(
        self,
        prompt_len: int,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        *,
        content: int | None = None,
        prompt: tuple[Token, ...] | None = None,
        cache_salt: int = 0,
    ) -> int:
        """Gives the request's ID; a request that can never fit is refused in the trace. No stop ids: EOS is ignored.

        Without `content` and `prompt` the request has nothing in common with any other.
        """
        if prompt_len < 1 or max_tokens < 1:
            raise ValueError(f"prompt_len and max_tokens must be at least 1, got {prompt_len} and {max_tokens}")
        seq = len(self.requests)
        content = seq if content is None else content
        prompt = tuple((content, i) for i in range(prompt_len)) if prompt is None else prompt
        request = Request(seq, prompt, max_tokens, frozenset(stop_ids), content, cache_salt)
        self.requests.append(request)
        self.news.append(Added(seq=request.seq, prompt_len=prompt_len, max_tokens=max_tokens, step=self.step_number))
        if reason := self.never_fits(request):
            self.news.append(Refused(seq=request.seq, prompt_len=prompt_len, reason=reason, step=self.step_number))
        else:
            self.waiting.append(request)
        return request.seq

    def abort(self, seq: int) -> None:
        """Between two steps. Nothing happens to a request that has finished or was refused."""
        request = self.requests[seq]
        if request in self.running:
            self.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        self.news.append(
            Cancelled(seq=seq, prompt_len=request.prompt_len, total_len=request.total_len, step=self.step_number)
        )

    def never_fits(self, request: Request) -> str | None:
        if request.prompt_len + 1 > self.config.max_model_len:
            return f"needs {request.prompt_len + 1} tokens, max_model_len is {self.config.max_model_len}"
        most_blocks = self.blocks_for(self.last_len(request) - 1)
        if most_blocks > self.config.num_blocks:
            return f"needs {most_blocks} blocks, num_blocks is {self.config.num_blocks}"
        return None

    def last_len(self, request: Request) -> int:
        return min(request.prompt_len + request.max_tokens, self.config.max_model_len)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def need(self, request: Request) -> int:
        return self.blocks_for(request.total_len)

    # A step

    def step(self) -> list[Event]:
        """Runs one step; its events in the order of the trace."""
        news, self.news = self.news, []
        if not (self.waiting or self.running):
            return news
        self.hits = {request.seq: self.look_up(request) for request in self.waiting}
        if self.config.schedule == "mixed":
            preempted, decodes, prefills, budget = self.plan_mixed()
        else:
            preempted, decodes, prefills, budget = self.plan_prefill_first()
        waits = self.wait_lines(budget)
        self.reserved = 0
        for request in decodes + [request for request, _ in prefills]:
            self.allocate(request)
        events = news + preempted
        events += [
            CacheHit(seq=request.seq, tokens=request.cached, step=self.step_number)
            for request, _ in prefills
            if request.seq in self.hits and request.cached
        ]
        events += [self.line(request, "PRE-FILL", tokens) for request, tokens in prefills]
        events += [self.line(request, "DECODE", 1) for request in decodes]
        events += waits
        events += self.run([(request, 1) for request in decodes] + prefills)
        self.step_number += 1
        return events

    def plan_mixed(self) -> "Plan":
        budget = self.config.max_num_batched_tokens
        preempted, decodes = self.plan_decodes(budget)
        budget -= len(decodes)
        prefills, budget = self.plan_prefills(budget, admit=not preempted)
        return preempted, decodes, prefills, budget

    def plan_prefill_first(self) -> "Plan":
        budget = self.config.max_num_batched_tokens
        prefills, budget = self.plan_prefills(budget, admit=True)
        if prefills:
            return [], [], prefills, budget
        preempted, decodes = self.plan_decodes(budget)
        return preempted, decodes, [], budget - len(decodes)

    def plan_decodes(self, budget: int) -> tuple[list[Event], list[Request]]:
        decodes = [request for request in self.running if not request.prefills][:budget]
        preempted: list[Event] = []
        while sum(self.need(request) - len(request.blocks) for request in decodes) > len(self.free):
            newest = self.running[-1]
            preempted.append(self.preempt(newest))
            decodes = [request for request in decodes if request is not newest]
        self.reserved = sum(self.need(request) - len(request.blocks) for request in decodes)
        return preempted, decodes

    def plan_prefills(self, budget: int, admit: bool) -> tuple[list[tuple[Request, int]], int]:
        """The prefills, each with its tokens, and the budget that is left."""
        prefills = []
        for request in [request for request in self.running if request.prefills]:
            tokens = min(request.total_len - request.cached, budget)
            if tokens > 0:
                prefills.append((request, tokens))
                budget -= tokens
        while admit and self.waiting and not self.why_not(self.waiting[0], budget):
            request = self.waiting.popleft()
            self.admit(request)
            tokens = min(request.total_len - request.cached, budget)
            prefills.append((request, tokens))
            budget -= tokens
        return prefills, budget

    def why_not(self, head: Request, budget: int) -> tuple[WaitingReason, int, int] | None:
        """The reason why the first of the queue is not admitted, with what it needs and what is free."""
        free_slots = self.config.max_num_seqs - len(self.running)
        if free_slots == 0:
            return "slots", 1, free_slots
        hits = self.hits.get(head.seq, [])
        taken = [block for block in hits if self.holders[block] == 0]
        needs, free = self.need(head) - len(hits) + len(taken), len(self.free) - self.reserved
        if needs > free:
            return "blocks", needs, free
        if budget == 0:
            return "tokens", head.total_len - len(hits) * self.config.block_size, budget
        return None

    def wait_lines(self, budget: int) -> list[Event]:
        events: list[Event] = []
        for ahead, request in enumerate(self.waiting):
            if ahead == 0:
                why = self.why_not(request, budget)
                assert why is not None, "a request waits without a reason"
                reason, needs, free = why
            else:
                reason, needs, free = "queue_order", self.need(request), len(self.free) - self.reserved
            changed, request.reason = reason != request.reason, reason
            if changed and (ahead == 0 or self.waiting_lines == "all"):
                events.append(
                    Waiting(seq=request.seq, reason=reason, needs=needs, free=free, ahead=ahead, step=self.step_number)
                )
        return events

    def run(self, scheduled: list[tuple[Request, int]]) -> list[Event]:
        """Forward, sample and commit."""
        events: list[Event] = []
        seen: set[Key] = set()
        for request, tokens in sorted(scheduled, key=lambda pair: pair[0].seq):
            self.fill(request, tokens, seen)
            request.cached += tokens
            if request.cached < request.total_len:
                continue
            token = self.next_token(request.content, request.total_len)
            request.generated.append(token)
            finish_reason = None
            if token in request.stop_ids:
                finish_reason = "stop"
            elif request.total_len == self.last_len(request):
                finish_reason = "length"
            if finish_reason:
                events.append(
                    Finished(
                        seq=request.seq,
                        prompt_len=request.prompt_len,
                        total_len=request.total_len,
                        finish_reason=finish_reason,
                        step=self.step_number,
                    )
                )
                self.leave(request)
        return events

    # Slots and blocks

    def admit(self, request: Request) -> None:
        taken = {other.slot for other in self.running}
        request.slot = min(set(range(self.config.max_num_seqs)) - taken)
        request.prefill_len = request.total_len
        request.reason = None
        self.running.append(request)
        for block in self.hits[request.seq]:
            if self.holders[block] == 0:
                self.free.remove(block)
            self.holders[block] += 1
            request.blocks.append(block)
        request.cached = len(request.blocks) * self.config.block_size
        self.reserved += self.need(request) - len(request.blocks)

    def allocate(self, request: Request) -> None:
        while len(request.blocks) < self.need(request):
            block = self.free.popleft()
            self.holders[block] = 1
            if block in self.key_of:
                del self.block_of[self.key_of.pop(block)]
            request.blocks.append(block)

    def preempt(self, request: Request) -> Event:
        event = Preempted(
            seq=request.seq, total_len=request.total_len, released=len(request.blocks), step=self.step_number
        )
        self.leave(request)
        request.cached = 0
        self.waiting.appendleft(request)
        return event

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        request.slot = None
        while request.blocks:
            block = request.blocks.pop()
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.append(block)

    # The prefix cache

    def key(self, request: Request, index: int) -> "Key":
        return request.cache_salt, request.tokens[: (index + 1) * self.config.block_size]

    def look_up(self, request: Request) -> list[int]:
        """The registered blocks that a waiting request begins with; its last token is not among theirs."""
        blocks: list[int] = []
        for index in range((request.total_len - 1) // self.config.block_size):
            block = self.block_of.get(self.key(request, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def fill(self, request: Request, tokens: int, seen: set["Key"]) -> None:
        """Register the blocks that these tokens fill. `seen`: the keys of those that the step has filled so far."""
        if not self.config.enable_prefix_caching:
            return
        size, goes_on = self.config.block_size, True
        num_full = request.cached // size
        if num_full > 0 and request.blocks[num_full - 1] not in self.key_of:
            return
        for index in range(num_full, (request.cached + tokens) // size):
            key, block = self.key(request, index), request.blocks[index]
            goes_on = goes_on and key not in self.block_of and key not in seen
            seen.add(key)
            if goes_on:
                self.block_of[key], self.key_of[block] = block, key

    def line(self, request: Request, phase: Literal["PRE-FILL", "DECODE"], tokens: int) -> Event:
        return Scheduled(
            seq=request.seq,
            phase=phase,
            prompt_len=request.prompt_len,
            total_len=request.total_len,
            num_blocks=len(request.blocks),
            cached=request.cached,
            scheduled=tokens,
            blocks=tuple(request.blocks),
            step=self.step_number,
        )


Key = tuple[int, tuple[Token, ...]]
"""A prefix: the cache salt, and the tokens up to the end of a block."""

# Preempted events, decodes, prefills with their tokens, budget left.
Plan = tuple[list[Event], list[Request], list[tuple[Request, int]], int]
