"""Part 4: whole models with random weights give the same greedy tokens on the kernels as on the reference.

Prompts are split in chunks and sequences are preempted on the way. Both run on the same device in float32. A first
difference where the reference's logits of the two tokens are hardly apart is a *near tie*: rounding may decide it.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from benchmarks.gpu_check.driver import Driver
from benchmarks.gpu_check.models import TINY, random_model
from benchmarks.gpu_check.part import Part, one_line
from benchmarks.models import QWEN3_0_6B, SMOLLM2_135M
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.requests import Request
from jaxpaged.models import Llama, ModelConfig, causal_attend
from jaxpaged.sampling_params import SamplingParams

NEAR_TIE = 1e-3  # of logits whose standard deviation is 3 to 4


@dataclass(frozen=True)
class Sizes:
    models: dict[str, ModelConfig]
    prompt_lens: tuple[int, ...]
    max_tokens: int
    engine: EngineConfig


FULL = Sizes(
    models={"smollm2-135m": SMOLLM2_135M, "qwen3-0.6b": QWEN3_0_6B},
    prompt_lens=(3, 120, 17, 64, 90, 33, 100, 48),
    max_tokens=32,
    engine=EngineConfig(
        num_blocks=20,
        block_size=16,
        max_num_seqs=4,
        max_num_waiting=8,
        max_num_batched_tokens=64,
        max_model_len=160,
    ),
)
SMALL = Sizes(
    models={"tiny": TINY},
    prompt_lens=(3, 30, 17, 25),
    max_tokens=12,
    engine=EngineConfig(
        num_blocks=4,
        block_size=16,
        max_num_seqs=2,
        max_num_waiting=4,
        max_num_batched_tokens=16,
        max_model_len=48,
        tile_q=8,
        max_steps=16,
    ),
)


def run(part: Part) -> None:
    sizes = SMALL if part.dry_run else FULL
    part.put(models={})
    implementations = ("reference", part.implementation)
    drivers: dict[tuple[str, str], Driver] = {}
    models = {}
    for name, config in sizes.models.items():
        models[name] = random_model(config, jnp.dtype("float32"))
        for implementation in implementations:
            drivers[name, implementation] = Driver(
                models[name], config, sizes.engine, attention_implementation=implementation
            )
    part.note(f"compiling {len(drivers)} loops")
    with ThreadPoolExecutor(min(len(drivers), os.cpu_count() or 1)) as workers:
        compiled = {key: workers.submit(_warm_up, driver) for key, driver in drivers.items()}
        for name, config in sizes.models.items():
            try:
                seconds = [compiled[name, implementation].result() for implementation in implementations]
                part.note(f"{name}: compiled")
                by_reference, by_kernel = (drivers[name, i] for i in implementations)
                result = compare(models[name], config, sizes, by_reference, by_kernel)
                # Side by side, so longer than each would take alone.
                result["compile_seconds"] = {"reference": seconds[0], "kernel": seconds[1]}
            except Exception as error:
                part.fail(f"{name}: {one_line(error)}")
                continue
            part.put(models=part.result["models"] | {name: result})
            _judge(part, name, result)
    part.put(complete=len(part.result["models"]) == len(sizes.models))


def _warm_up(driver: Driver) -> float:
    start = time.perf_counter()
    driver.warm_up()
    return time.perf_counter() - start


def _judge(part: Part, name: str, result: dict[str, Any]) -> None:
    for difference in result["differences"]:
        if not difference["is_near_tie"]:
            part.fail(f"{name}: {difference}")
    for what in ("preemptions", "chunks"):
        if not result[what]:
            part.fail(f"{name}: no {what}, so the load does not try what it is there for")
    if result["distinct_tokens"] < 2 * result["sequences"]:
        part.fail(f"{name}: only {result['distinct_tokens']} distinct tokens came out: what is compared says little")
    part.note(f"{name}: {result['equal_sequences']} of {result['sequences']} sequences are equal")


def compare(model: Llama, config: ModelConfig, sizes: Sizes, by_reference: Driver, by_kernel: Driver) -> dict[str, Any]:
    want, got = (_generate(driver, config, sizes) for driver in (by_reference, by_kernel))
    differences = []
    for a, b in zip(want, got, strict=True):
        if a.token_ids == b.token_ids:
            continue
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.token_ids, b.token_ids, strict=True)))
        tokens = a.token_ids[same], b.token_ids[same]
        margin = _margin(model, a.prompt_token_ids + a.token_ids[:same], *tokens, sizes.engine.max_model_len)
        differences.append(
            {
                "sequence": a.seq,
                "output_position": same,
                "reference_token": tokens[0],
                "token": tokens[1],
                "margin": margin,
                "is_near_tie": abs(margin) < NEAR_TIE,
            }
        )
    return {
        "sequences": len(want),
        "tokens": sum(len(request.token_ids) for request in want),
        "equal_sequences": len(want) - len(differences),
        "distinct_tokens": len({token for request in want for token in request.token_ids}),
        "differences": differences,
        "preemptions": by_kernel.preemptions,
        "chunks": by_kernel.chunks,
        "steps": sum(run.prefill_steps + run.decode_steps for run in by_kernel.run_stats),
    }


def _generate(driver: Driver, config: ModelConfig, sizes: Sizes) -> list[Request]:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=sizes.max_tokens, ignore_eos=True)
    requests = [
        driver.add_request(rng.integers(config.vocab_size, size=length).tolist(), params)
        for length in sizes.prompt_lens
    ]
    while driver.has_unfinished_requests():
        driver.run()
    return requests


def _margin(model: Llama, tokens: list[int], preferred: int, other: int, most: int) -> float:
    """How much higher the plain model's logit of `preferred` is than that of `other`, after `tokens`."""
    padded = np.pad(np.array(tokens, np.int32), (0, most - len(tokens)))
    positions = np.where(np.arange(most) < len(tokens), np.arange(most), -1).astype(np.int32)
    logits = np.asarray(_plain_logits(*nnx.split(model), padded, positions, len(tokens) - 1))
    return float(logits[preferred] - logits[other])


def _plain(
    graphdef: Any, params: Any, tokens: Int[Array, " T"], positions: Int[Array, " T"], last: Int[Array, ""]
) -> Array:
    model = nnx.merge(graphdef, params)
    return model.logits(model(tokens, positions, causal_attend(positions))[last][None])[0]


_plain_logits: Callable[..., Array] = jax.jit(_plain, static_argnums=0)
