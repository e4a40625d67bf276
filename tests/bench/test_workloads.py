"""The workloads are the same everywhere, since other engines are given them, too."""

import json
from dataclasses import replace

import pytest

from jaxpaged.bench import workloads
from jaxpaged.bench.workloads import DEFINITIONS, NANO, draw

SMOLLM2_VOCAB = 49152


def test_the_standing_workload() -> None:
    """64 requests of 32-256 in and 32-128 out; the tokens that benchmarks name."""
    load = draw(DEFINITIONS["throughput"], SMOLLM2_VOCAB)
    lengths = [len(request.prompt_token_ids) for request in load.requests]
    assert (len(load.requests), load.prompt_tokens, load.output_tokens) == (64, 8864, 5058)
    assert (min(lengths), max(lengths)) == (33, 255)
    assert {request.arrival for request in load.requests} == {0.0}
    assert load.requests[0].prompt_token_ids[:4] == [25347, 27662, 2753, 17068]


def test_nano_vllms_workload() -> None:
    """As its bench.py says: 133,966 output tokens."""
    load = draw(NANO, 151936)
    assert (len(load.requests), load.output_tokens) == (256, 133_966)


def test_a_small_vocabulary_has_room_for_all_token_ids() -> None:
    tokens = {token for request in draw(DEFINITIONS["throughput"], 50).requests for token in request.prompt_token_ids}
    assert tokens == set(range(50))


def test_a_shared_prefix_is_shared_and_what_follows_is_not() -> None:
    load = draw(replace(DEFINITIONS["shared-prefix"], requests=5, shared_prefix=7), SMOLLM2_VOCAB)
    prompts = [request.prompt_token_ids for request in load.requests]
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert len({tuple(prompt[7:12]) for prompt in prompts}) == 5
    assert all(7 + 16 <= len(prompt) <= 7 + 64 for prompt in prompts)


def test_requests_arrive_at_the_rate() -> None:
    load = draw(replace(DEFINITIONS["serve-like"], requests=4000, prompt_len=(1, 1), rate=8.0), SMOLLM2_VOCAB)
    arrivals = [request.arrival for request in load.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 / 8.0, rel=0.05)


def test_a_workload_is_written_for_others(tmp_path) -> None:
    load = draw(replace(DEFINITIONS["throughput"], requests=2, prompt_len=(3, 3)), SMOLLM2_VOCAB)
    workloads.write(load, tmp_path / "load.json")
    content = json.loads((tmp_path / "load.json").read_text())
    assert content["definition"]["prompt_len"] == [3, 3]
    assert content["greedy"] and content["ignore_eos"]
    assert [each["prompt_token_ids"] for each in content["requests"]] == [r.prompt_token_ids for r in load.requests]
    assert [each["max_tokens"] for each in content["requests"]] == [r.max_tokens for r in load.requests]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 0}, "requests must be at least 1, not 0"),
        ({"prompt_len": (5, 4)}, "prompt-len .* not 5-4"),
        ({"output_len": (0, 4)}, "output-len .* not 0-4"),
        ({"shared_prefix": -1}, "prefix-len .* not -1"),
        ({"rate": 0.0}, "rate must be above 0"),
    ],
)
def test_what_is_no_workload(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(replace(DEFINITIONS["throughput"], **change), SMOLLM2_VOCAB)
