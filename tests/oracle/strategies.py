"""What hypothesis draws: limits, and mixes of requests that press against them.

A mix is a list of rounds: abort these requests, add those, then run at most so many steps. After the last round one
runs until nothing is left. That is how the device engine is driven too, so both see every request at the same step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from jaxpaged.trace import Event
from tests.oracle.fake import FakeForward
from tests.oracle.scheduler import Oracle, OracleConfig, Token

VALUES = 32  # of a content's tokens


@dataclass(frozen=True)
class RequestSpec:
    """A request's tokens are its content's, but the first `shared_len` of its prompt, which are content `like`'s.

    content: None is one of its own. Two of one content generate the same tokens.
    """

    prompt_len: int
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    content: int | None = None
    shared_len: int = 0
    like: int = 0
    cache_salt: int = 0

    def prompt(self, seq: int) -> tuple[Token, ...]:
        own = self.content_of(seq)
        # The last token is always its own: what comes after it is the content's.
        shared = min(self.shared_len, self.prompt_len - 1)
        return tuple((self.like if i < shared else own, i % VALUES) for i in range(self.prompt_len))

    def content_of(self, seq: int) -> int:
        return seq if self.content is None else self.content


@dataclass(frozen=True)
class Round:
    requests: tuple[RequestSpec, ...]
    max_steps: int
    aborts: tuple[int, ...] = ()  # places in the list of all requests; those that are not there yet are left out


@dataclass(frozen=True)
class Mix:
    rounds: tuple[Round, ...]
    forward: FakeForward


# For a device engine, whose limits are shapes that must be compiled: few, each tight in its own way.
PINNED_CONFIGS = (
    OracleConfig(1, 12, 3, 4, 12, "mixed"),  # a block for every token
    OracleConfig(1, 12, 3, 100, 12, "prefill_first"),
    OracleConfig(2, 7, 4, 3, 14, "mixed"),  # everything short: blocks, budget, slots
    OracleConfig(2, 7, 4, 3, 14, "prefill_first"),
    OracleConfig(2, 10, 8, 5, 20, "mixed"),  # budget below the slots: not every decode runs
    OracleConfig(2, 10, 8, 1, 20, "mixed"),
    OracleConfig(2, 10, 8, 1, 20, "prefill_first"),
    OracleConfig(3, 6, 4, 7, 17, "mixed"),
    OracleConfig(4, 5, 4, 6, 20, "prefill_first"),
    OracleConfig(4, 40, 2, 9, 24, "mixed"),  # slots short, blocks plenty
    OracleConfig(4, 40, 2, 9, 24, "prefill_first"),
    OracleConfig(4, 3, 4, 200, 30, "mixed"),  # a pool below max_model_len: requests are refused for blocks
    OracleConfig(16, 4, 3, 8, 40, "mixed"),
    OracleConfig(8, 6, 1, 5, 32, "mixed"),  # one slot
    OracleConfig(2, 7, 4, 3, 14, "mixed", enable_prefix_caching=False),
    OracleConfig(2, 7, 4, 3, 14, "prefill_first", enable_prefix_caching=False),
)


@st.composite
def configs(draw: st.DrawFn) -> OracleConfig:
    """Small limits; the pool from far below what the slots could hold to plenty."""
    block_size = draw(st.sampled_from([1, 2, 2, 3, 4, 4, 5, 8, 16]))
    max_model_len = draw(st.integers(2, 32))
    max_num_seqs = draw(st.integers(1, 8))
    longest = -(-max_model_len // block_size)
    num_blocks = draw(
        st.one_of(st.integers(longest, 2 * longest), st.integers(1, longest), st.integers(1, longest * max_num_seqs))
    )
    return OracleConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.one_of(st.integers(1, 10), st.integers(1, 40), st.just(10**6))),
        max_model_len=max_model_len,
        schedule=draw(st.sampled_from(["mixed", "prefill_first"])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def mixes(draw: st.DrawFn, config: OracleConfig, max_requests: int = 12) -> Mix:
    """Requests of every length that fits and some that do not, in up to four rounds, with and without stop ids."""
    vocab_size = draw(st.sampled_from([2, 8, 32]))
    capacity = min(config.max_model_len, config.num_blocks * config.block_size)
    prompt_lens = st.one_of(
        st.integers(1, max(1, capacity // 3)), st.integers(1, max(1, capacity - 1)), st.integers(1, capacity + 3)
    )
    # A long output holds its blocks and grows: what preemption needs.
    max_tokens = st.one_of(
        st.integers(max(1, capacity // 3), capacity), st.integers(1, 4), st.integers(1, config.max_model_len + 3)
    )
    stop_ids = st.sampled_from([(), (), (0,), (0, 1)])
    requests = st.builds(
        RequestSpec,
        prompt_lens,
        max_tokens,
        stop_ids,
        content=st.sampled_from([None, None, 0, 1]),
        shared_len=st.one_of(st.just(0), st.integers(0, capacity), st.just(capacity)),
        like=st.integers(0, 1),
        cache_salt=st.sampled_from([0, 0, 0, 1]),
    )
    # The size is drawn first: hypothesis' own lists are mostly short, and a crowd is what fills slots and budget.
    batches = st.integers(1, max_requests // 2).flatmap(lambda n: st.lists(requests, min_size=n, max_size=n).map(tuple))
    aborts = st.lists(st.integers(0, max_requests), max_size=4, unique=True).map(tuple)
    rounds = st.lists(st.builds(Round, batches, st.integers(0, 12), aborts), min_size=1, max_size=4)
    return Mix(tuple(draw(rounds)), FakeForward(vocab_size, draw(st.integers(0, 2**32 - 1))))


@st.composite
def cases(draw: st.DrawFn) -> tuple[OracleConfig, Mix]:
    config = draw(configs())
    return config, draw(mixes(config))


def drive(oracle: Oracle, mix: Mix) -> Iterator[list[Event]]:
    """Runs a mix to its end; yields the events of each step."""
    for round_ in mix.rounds:
        for seq in round_.aborts:
            if seq < len(oracle.requests):
                oracle.abort(seq)
        for request in round_.requests:
            seq = len(oracle.requests)
            oracle.add_request(
                request.prompt_len,
                request.max_tokens,
                request.stop_ids,
                content=request.content_of(seq),
                prompt=request.prompt(seq),
                cache_salt=request.cache_salt,
            )
        for _ in range(round_.max_steps):
            if oracle.done:
                break
            yield oracle.step()
    while not oracle.done:
        yield oracle.step()
