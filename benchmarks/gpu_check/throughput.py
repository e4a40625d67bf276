"""Part 3: nano-vllm's benchmark load on the Qwen3-0.6B shape, and the host's share of its time.

256 requests of 100 to 1,024 random tokens in and 100 to 1,024 out, from Python's generator with seed 0, as its bench.py
draws them: 133,966 output tokens. Greedy here, EOS ignored. The weights are random, which changes no shape.

The host's share has two sides. `idle_seconds`: what passed between the end of a run and the hand-over of the next
(clock.py); the device had nothing to do. And, from a profile of some runs in the middle, the time in which no kernel
ran although a run was under way: on a GPU the host starts every kernel of a loop, and asks for each condition.
"""

import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check.clock import RunClock, busy_share
from benchmarks.gpu_check.driver import Driver
from benchmarks.gpu_check.measure import free_bytes
from benchmarks.gpu_check.models import TINY, random_model
from benchmarks.gpu_check.part import Part
from benchmarks.models import QWEN3_0_6B
from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.stats import phase_times
from jaxpaged.models import ModelConfig
from jaxpaged.sampling_params import SamplingParams

_DTYPE = jnp.dtype("bfloat16")
_PROFILED_RUNS = 2
Load = list[tuple[list[int], int]]  # prompts, and how many tokens to generate


@dataclass(frozen=True)
class Sizes:
    model: ModelConfig
    requests: int
    fewest_tokens: int
    most_tokens: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_steps: int
    repeats: int


FULL = Sizes(
    model=QWEN3_0_6B,
    requests=256,
    fewest_tokens=100,
    most_tokens=1024,
    block_size=256,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_steps=64,
    repeats=3,
)
SMALL = Sizes(
    model=TINY,
    requests=3,
    fewest_tokens=4,
    most_tokens=20,
    block_size=16,
    max_num_seqs=1,
    max_num_batched_tokens=16,
    max_steps=8,
    repeats=1,
)


def nano_vllm_load(requests: int, fewest: int, most: int, vocab_size: int) -> Load:
    """Its tokens are below 10,000."""
    rng = random.Random(0)
    top = min(10_000, vocab_size - 1)
    prompts = [[rng.randint(0, top) for _ in range(rng.randint(fewest, most))] for _ in range(requests)]
    return [(prompt, rng.randint(fewest, most)) for prompt in prompts]


def engine_config(sizes: Sizes, load: Load) -> EngineConfig:
    """Blocks for the whole load at once, or as many as six tenths of the free memory hold."""
    model = sizes.model
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * _DTYPE.itemsize
    wanted = sum(-(-(len(prompt) + tokens) // sizes.block_size) for prompt, tokens in load)
    return EngineConfig(
        num_blocks=min(wanted, int(0.6 * free_bytes()) // (token_bytes * sizes.block_size)),
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_waiting=max(1, len(load) - sizes.max_num_seqs),
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=2 * sizes.most_tokens,
        max_steps=sizes.max_steps,
    )


def run(part: Part) -> None:
    sizes = SMALL if part.dry_run else FULL
    model = random_model(sizes.model, _DTYPE)
    load = nano_vllm_load(sizes.requests, sizes.fewest_tokens, sizes.most_tokens, sizes.model.vocab_size)
    config = engine_config(sizes, load)
    kind, driver = _engine_class()
    part.note(f"{kind}, {config.num_blocks} blocks: compiling {len(config.buckets)} buckets")
    engine = driver(model, sizes.model, config, kv_dtype=_DTYPE, attention_implementation=part.implementation)
    start = time.perf_counter()
    engine.warm_up()
    part.put(
        driver=kind,
        compile_seconds=time.perf_counter() - start,
        engine=dict(vars(config)),
        requests=len(load),
        prompt_tokens=sum(len(prompt) for prompt, _ in load),
        output_tokens=sum(tokens for _, tokens in load),
        loads=[],
    )
    part.note(f"compiled in {part.result['compile_seconds']:.1f} s")
    engine._run = clock = RunClock(engine._run)
    for _ in range(sizes.repeats):
        measured = _measure(engine, clock, load)
        part.put(loads=[*part.result["loads"], measured])
        part.note(f"{measured['output_tokens_per_second']:.0f} output tokens/s in {measured['seconds']:.2f} s")
        if measured["output_tokens"] != part.result["output_tokens"]:
            part.fail(f"{measured['output_tokens']} tokens came out, not {part.result['output_tokens']}")
        if not part.has_time_for(2 * measured["seconds"] + 10):
            break
    part.put(output_tokens_per_second=median(x["output_tokens_per_second"] for x in part.result["loads"]))
    part.put(single_sequence=_single(engine, load))
    no_time = {"error": "the time is up"}
    part.put(profile=_profile(engine, load, sizes) if part.has_time_for(15) else no_time)
    part.put(complete=True)


def _engine_class() -> tuple[str, Any]:
    try:
        from jaxpaged.engine.engine import Engine
    except ModuleNotFoundError as error:
        return f"the check's own driver (no module {error.name} for Engine)", Driver
    return "Engine", Engine


def _add(engine: Any, load: Load) -> list[Any]:
    return [
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        for prompt, tokens in load
    ]


def _measure(engine: Any, clock: RunClock, load: Load) -> dict[str, Any]:
    clock.clear()
    engine.run_stats.clear()
    start = time.perf_counter()
    requests = _add(engine, load)
    while engine.has_unfinished_requests():
        engine.run()
    seconds = time.perf_counter() - start
    phases = phase_times(engine.run_stats)
    tokens = sum(len(request.token_ids) for request in requests)
    return {
        "seconds": seconds,
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
        "steps": sum(stats.prefill_steps + stats.decode_steps for stats in engine.run_stats),
        "prefill_seconds": phases.prefill_seconds,
        "decode_seconds": phases.decode_seconds,
        "decode_tokens_per_second": phases.decode_tokens / phases.decode_seconds if phases.decode_seconds else None,
        "runs": clock.num_runs,
        "dispatch_seconds": clock.dispatch_seconds,
        "idle_seconds": clock.idle_seconds,
        "idle_share": clock.idle_seconds / seconds,
    }


def _single(engine: Any, load: Load) -> dict[str, float]:
    """One sequence alone, where a step is short and what the host adds to it shows most."""
    engine.run_stats.clear()
    _add(engine, [(load[0][0], load[0][1])])
    while engine.has_unfinished_requests():
        engine.run()
    phases = phase_times(engine.run_stats)
    return {"output_tokens": load[0][1], "decode_step_ms": 1e3 * phases.decode_seconds / max(1, phases.decode_tokens)}


def _profile(engine: Any, load: Load, sizes: Sizes) -> dict[str, Any]:
    """Of runs that decode all sequences at once."""
    requests = _add(engine, [(prompt, sizes.most_tokens) for prompt, _ in load[: sizes.max_num_seqs]])
    while not all(request.token_ids for request in requests):
        engine.run()

    def some_runs() -> None:
        for _ in range(_PROFILED_RUNS):
            if engine.has_unfinished_requests():
                engine.run()

    found = busy_share(some_runs)
    jax.block_until_ready(engine._state)
    return found
