"""The checker on true traces with one field changed: it finds each change that some rule can tell."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from jaxpaged.trace import Added, CacheHit, Event, Finished, Preempted, Refused, Scheduled, Waiting, check_events
from tests.oracle.scheduler import Oracle, OracleConfig
from tests.oracle.strategies import Mix, cases, drive

# What no rule can tell: when it was, why it ended, and a promise that was never put to the test.
FREE = {(Refused, "reason"), (Finished, "finish_reason"), (Added, "max_tokens")}


@pytest.mark.parametrize("kind", [Added, Refused, Preempted, CacheHit, Waiting, Scheduled, Finished])
def test_each_changed_field_is_found(kind: type[Event]) -> None:
    names = [name.name for name in fields(kind) if name.name not in ("step", "time_us")]
    for name in [name for name in names if (kind, name) not in FREE]:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(cases(), st.data(), st.just(name))
        def run(case: tuple[OracleConfig, Mix], data: st.DataObject, name: str) -> None:
            config, mix = case
            events = [event for step in drive(Oracle(config, mix.forward), mix) for event in step]
            places = [
                at for at, event in enumerate(events) if isinstance(event, kind) and told(config, events, at, name)
            ]
            if not places:
                return
            at = data.draw(st.sampled_from(places))
            damaged = replace(events[at], **{name: changed(data, config, events, at, name)})
            limits = {limit: getattr(config, limit) for limit in LIMITS}
            assert check_events([*events[:at], damaged, *events[at + 1 :]], **limits, complete=True) != [], damaged

        run()


LIMITS = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_prefix_caching",
)


def told(config: OracleConfig, events: list[Event], at: int, name: str) -> bool:
    """Whether the events tell the field: blocks and chunks before PREEMPTED leave no mark, and what the prefix cache
    has of a waiting sequence no line says."""
    event = events[at]
    if isinstance(event, Waiting) and name in ("needs", "reason"):
        return not (config.enable_prefix_caching and event.reason in ("blocks", "tokens"))
    if name not in ("blocks", "scheduled"):
        return True
    following = next(later for later in events[at + 1 :] if later.seq == event.seq and not isinstance(later, Waiting))
    return isinstance(following, Scheduled if name == "blocks" else Scheduled | Finished)


def changed(data: st.DataObject, config: OracleConfig, events: list[Event], at: int, name: str) -> object:
    value = getattr(events[at], name)
    if name == "phase":
        return "DECODE" if value == "PRE-FILL" else "PRE-FILL"
    if name == "reason":
        return data.draw(st.sampled_from(["slots", "blocks", "tokens", "queue_order"]).filter(lambda new: new != value))
    if name == "blocks":
        place = data.draw(st.integers(0, len(value) - 1))
        block = data.draw(st.integers(0, config.num_blocks).filter(lambda new: new != value[place]))
        return data.draw(st.sampled_from([value[:-1], (*value, block), (*value[:place], block, *value[place + 1 :])]))
    near = st.sampled_from([value - 1, value + 1]).filter(lambda new: new >= 0)
    return data.draw(st.one_of(near, st.integers(0, 40).filter(lambda new: new != value)))
