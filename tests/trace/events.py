"""Events for the tests of the trace: drawn ones, and those of TRACE.md's worked example."""

from collections.abc import Iterator
from string import printable

from hypothesis import strategies as st
from msgspec.structs import replace

from jaxpaged.trace import Added, CacheHit, Cancelled, Event, Finished, Preempted, Refused, Scheduled, Waiting

counts = st.one_of(st.integers(0, 20), st.integers(0, 10**12))
line_text = st.text(st.sampled_from(printable.split("\t")[0] + "é漢🙂"), max_size=20)


def scheduled(phase: str) -> st.SearchStrategy[Event]:
    return st.builds(
        Scheduled,
        seq=counts,
        phase=st.just(phase),
        prompt_len=counts,
        total_len=counts,
        num_blocks=counts,
        cached=counts,
        scheduled=counts,
        blocks=st.lists(counts, max_size=5).map(tuple),
    )


def sums(kind: type) -> st.SearchStrategy[Event]:
    """FINISHED and CANCELLED: the total is at least the prompt."""
    reason = {"finish_reason": st.none()} if kind is Finished else {}
    made = st.tuples(counts, counts, counts, st.fixed_dictionaries(reason))
    return made.map(lambda t: kind(seq=t[0], prompt_len=t[1], total_len=t[1] + t[2], **t[3]))


heads = st.builds(
    Waiting,
    seq=counts,
    reason=st.sampled_from(["slots", "blocks", "tokens"]),
    needs=counts,
    free=counts,
    ahead=st.just(0),
)
followers = st.builds(
    Waiting, seq=counts, reason=st.just("queue_order"), needs=counts, free=counts, ahead=st.integers(1, 10**6)
)
before_header = st.one_of(
    st.builds(Added, seq=counts, prompt_len=counts, max_tokens=counts),
    st.builds(Refused, seq=counts, prompt_len=counts, reason=line_text),
    sums(Cancelled),
    st.builds(Preempted, seq=counts, total_len=counts, released=counts),
    st.builds(CacheHit, seq=counts, tokens=counts),
)
after_header = st.one_of(heads, followers, sums(Finished))
any_event = st.one_of(before_header, scheduled("PRE-FILL"), scheduled("DECODE"), after_header)


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """The events of a few steps, in the order of a trace; the values need not make sense."""
    events: list[Event] = []
    steps = draw(st.lists(st.integers(0, 10**6), unique=True, max_size=4).map(sorted))
    for step in steps:
        prefills, decodes = (
            draw(st.lists(scheduled("PRE-FILL"), max_size=3)),
            draw(st.lists(scheduled("DECODE"), max_size=3)),
        )
        if not prefills and not decodes:
            decodes = [draw(scheduled("DECODE"))]
        leading, trailing = draw(st.lists(before_header, max_size=3)), draw(st.lists(after_header, max_size=3))
        events += [with_step(event, step) for event in [*leading, *prefills, *decodes, *trailing]]
    next_step = steps[-1] + 1 if steps else 0
    return events + [with_step(event, next_step) for event in draw(st.lists(before_header, max_size=2))]


def with_step(event: Event, step: int) -> Event:
    return replace(event, step=step)


def worked_example() -> Iterator[Event]:
    """Eight prompts, the last of 6 tokens, max_tokens 64, EOS ignored, block_size 256."""
    prompt_lens = [6, 6, 6, 6, 6, 6, 6, 6]
    for seq, prompt_len in enumerate(prompt_lens):
        yield Added(seq=seq, prompt_len=prompt_len, max_tokens=64)
    for step in range(64):
        for seq, prompt_len in enumerate(prompt_lens):
            total_len = prompt_len + step
            yield Scheduled(
                step=step,
                seq=seq,
                phase="DECODE" if step else "PRE-FILL",
                prompt_len=prompt_len,
                total_len=total_len,
                num_blocks=1,
                cached=total_len - 1 if step else 0,
                scheduled=1 if step else prompt_len,
                blocks=(seq,),
            )
    for seq, prompt_len in enumerate(prompt_lens):
        yield Finished(step=63, seq=seq, prompt_len=prompt_len, total_len=prompt_len + 64, finish_reason="length")
