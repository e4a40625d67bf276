"""The real model through the engine: greedy tokens equal those of transformers (torch, float32, the same GGUF)."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Llama
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.trace import Event, Preempted

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
NEAR_TIE = 1e-3
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelConfig, Llama]:
    return checkpoints.load(checkpoints.packaged(checkpoints.SMOLLM2))


@pytest.fixture(scope="module")
def default_engine(smollm2: tuple[ModelConfig, Llama]) -> Engine:
    config, model = smollm2
    sizes = EngineConfig(
        num_blocks=32,
        block_size=256,
        max_num_seqs=24,
        max_num_waiting=8,
        max_num_batched_tokens=512,
        max_model_len=1024,
    )
    return Engine(model, config, sizes)


def generate(engine: Engine, cases: list[dict[str, Any]], max_steps: int | None = None) -> list[list[int]]:
    requests = [
        engine.add_request(case["prompt_token_ids"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        for case in cases
    ]
    while engine.has_unfinished_requests():
        engine.run(max_steps)
    return [request.token_ids for request in requests]


def assert_golden(outputs: list[list[int]], cases: list[dict[str, Any]]) -> None:
    """Equal up to a near tie, where rounding may decide; a case that differs from there on is named in a warning."""
    for got, case in zip(outputs, cases, strict=True):
        near_ties = [i for i, margin in enumerate(case["margins"]) if margin < NEAR_TIE]
        certain = near_ties[0] if near_ties else len(case["token_ids"])
        assert got[:certain] == case["token_ids"][:certain], case["text"]
        if got != case["token_ids"]:
            warnings.warn(f"differs from a near tie at token {certain} on: {case['text'][:40]!r}", stacklevel=2)


def test_the_golden_file_holds_enough() -> None:
    assert len(CASES) >= 20
    assert {case["kind"] for case in CASES} == {"chat", "raw"}
    assert all(len(case["token_ids"]) == 40 for case in CASES)


def test_in_a_batch(default_engine: Engine) -> None:
    assert_golden(generate(default_engine, CASES), CASES)


def test_alone(default_engine: Engine) -> None:
    for case in CASES:
        assert_golden(generate(default_engine, [case]), [case])


@pytest.mark.parametrize(
    ("sizes", "max_steps", "cases"),
    [
        # Two sequences that outgrow the pool together, in blocks of 16.
        (
            {
                "block_size": 16,
                "num_blocks": 14,
                "max_num_batched_tokens": 32,
                "max_num_seqs": 4,
                "schedule": "prefill_first",
            },
            64,
            8,
        ),
        (
            {"block_size": 4, "num_blocks": 45, "max_num_batched_tokens": 7, "max_num_seqs": 4, "schedule": "mixed"},
            5,
            6,
        ),
        (
            {"block_size": 1, "num_blocks": 180, "max_num_batched_tokens": 1, "max_num_seqs": 2, "schedule": "mixed"},
            64,
            3,
        ),
    ],
    ids=["blocks-of-16", "blocks-of-4", "blocks-of-1"],
)
def test_other_sizes(smollm2: tuple[ModelConfig, Llama], sizes: dict[str, Any], max_steps: int, cases: int) -> None:
    config, model = smollm2
    events: list[Event] = []
    chosen = sorted(CASES, key=lambda case: len(case["prompt_token_ids"]))[2 : 2 + 2 * cases : 2]
    engine_sizes = EngineConfig(**sizes, max_num_waiting=8, max_model_len=181)
    engine = Engine(model, config, engine_sizes, trace=events.append)
    assert_golden(generate(engine, chosen, max_steps), chosen)
    if engine_sizes.block_size > 1:
        assert any(isinstance(event, Preempted) for event in events)
