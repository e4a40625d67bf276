"""One benchmark run: floors and the workload by turns, with and without what is to be compared; decodes; floors."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jaxpaged.bench import memory, results
from jaxpaged.bench.compare import FORMAT
from jaxpaged.bench.compiles import CompileCounter, Compiles
from jaxpaged.bench.floors import FloorBench, Floors, middle_of
from jaxpaged.bench.measure import Served, Server, serve_all, serve_arriving, serve_streamed, steps_of
from jaxpaged.bench.probe import pool_bytes, state_bytes, traced, weights
from jaxpaged.bench.workloads import Definition, Workload, describe, draw
from jaxpaged.llm import LLM

# A decode at a full batch, and of one sequence: contexts like those of the standing workload, runs that only decode.
_PROBE_PROMPT, _PROBE_OUTPUT, _SHORT_PROMPT = 128, 80, 32


@dataclass(frozen=True)
class Options:
    """trace, stream: also measure what they cost. floors: also measure those, and decodes at a full batch and at 1."""

    repeats: int = 3
    trace: bool = False
    stream: bool = False
    floors: bool = True


def run_session(
    llm: LLM, workload: Workload, options: Options, counter: CompileCounter, loaded: dict[str, Any]
) -> dict[str, Any]:
    """Everything about one workload, as `--json` writes it. `loaded`: what was known before, about the start."""
    check_fits(workload, llm)
    engine = llm.engine
    bench = FloorBench(engine) if options.floors else None
    servers = _servers(workload, options)
    served: dict[str, list[Served]] = {name: [] for name in servers}
    compiles, peaks, passes = Compiles(), list[int](), list[Floors]()
    is_peak_own = True
    for repeat in range(options.repeats):
        if bench:
            _note(f"floors, pass {repeat + 1}")
            passes.append(bench.measure())
        # There and back, so that none is always the first.
        for name, server in list(servers.items())[:: -1 if repeat % 2 else 1]:
            is_peak_own &= memory.forget_peak()
            before = counter.so_far
            served[name].append(_serve(llm, workload, name, server))
            compiles += counter.so_far - before
            if name == "plain":
                peaks.append(memory.peak_host_bytes())
            _note(f"{name}, {repeat + 1} of {options.repeats}: {served[name][-1].seconds:.2f} s")
    plain = served["plain"]
    steps = steps_of(plain, llm)
    repetitions = {
        name: [results.rates(each, workload.prompt_tokens) for each in many] for name, many in served.items()
    }
    found: dict[str, Any] = {
        "format": FORMAT,
        "workload": describe(workload.definition)
        | {"prompt_tokens": workload.prompt_tokens, "output_tokens": workload.output_tokens},
        "machine": results.machine(),
        "start": loaded,
        "engine": dict(vars(engine.config)),
        "measured": results.middle(repetitions["plain"]),
        "repetitions": repetitions["plain"],
        "steps": results.steps_summary(plain, steps, engine.config),
        "costs": {name: _cost(repetitions["plain"], many) for name, many in repetitions.items() if name != "plain"},
        "memory": {
            "weight_bytes": sum(leaf.nbytes for leaf in weights(engine).values()),
            "pool_bytes": pool_bytes(engine),
            "other_state_bytes": state_bytes(engine),
            "peak_host_bytes": max(peaks),
            "peak_is_of_the_workload": is_peak_own,
            "peak_device_bytes": memory.peak_device_bytes(),
        },
    }
    if bench:
        passes.append(bench.measure())
        before = counter.so_far
        batch = min(engine.config.max_num_seqs, engine.config.max_num_batched_tokens)
        probes = [(size, _probe(llm, size)) for size in sorted({batch, 1}, reverse=True)]
        compiles += counter.so_far - before
        passes.append(bench.measure())
        around_probes = middle_of(passes[-2:])
        found["floors"] = results.floors_summary(passes)
        found["decode"] = [
            results.decode_share(probe, own, size, around_probes)
            for size, probe in probes
            if probe
            for own in steps_of([probe], llm)
        ]
        found["decode"] = [share for share in found["decode"] if share]
        found["share"] = results.workload_share(plain, steps, passes)
        costs = results.padding_seconds(steps[0], engine.config, middle_of(passes))
        for bucket, cost in zip(found["steps"]["buckets"], costs, strict=True):
            bucket["padding_seconds"] = cost
    found["compiles_after_warm_up"] = vars(compiles)
    return found


def check_fits(workload: Workload, llm: LLM) -> None:
    """Raise ValueError if the engine would refuse a request, or end it early."""
    config = llm.engine.config
    if workload.longest > config.max_model_len:
        raise ValueError(
            f"a request of this workload has {workload.longest} tokens, max_model_len is {config.max_model_len}"
        )
    if config.blocks_for(workload.longest - 1) > config.num_blocks:
        blocks = config.blocks_for(workload.longest - 1)
        raise ValueError(f"a request of this workload needs {blocks} blocks, num_blocks is {config.num_blocks}")


def _servers(workload: Workload, options: Options) -> dict[str, Server]:
    plain = serve_all if workload.definition.rate is None else serve_arriving
    servers: dict[str, Server] = {"plain": plain}
    if options.trace:
        servers["trace"] = plain
    if options.stream:
        servers["stream"] = serve_streamed
    return servers


def _serve(llm: LLM, workload: Workload, name: str, server: Server) -> Served:
    llm.reset_prefix_cache()  # each repetition has the same prompts, and shall compute them
    if name != "trace":
        return server(llm, workload)
    with tempfile.TemporaryDirectory() as folder, traced(llm, Path(folder) / "trace.jsonl"):
        return server(llm, workload)


def _cost(plain: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per second with it as a share of those without, pair by pair: they ran one after the other."""
    rate = "output_tokens_per_second"
    ratios = [with_it[rate] / without[rate] for with_it, without in zip(other, plain, strict=True)]
    return {"ratio": median(ratios), "ratios": ratios}


def _probe(llm: LLM, batch: int) -> Served | None:
    """`batch` equal requests; None where a sequence cannot be long enough to tell anything."""
    config = llm.engine.config
    prompt = min(_PROBE_PROMPT if batch > 1 else _SHORT_PROMPT, config.max_model_len // 2)
    output = min(_PROBE_OUTPUT, config.max_model_len - prompt)
    definition = Definition("probe", batch, (prompt, prompt), (output, output))
    workload = draw(definition, llm.engine.model_config.vocab_size)
    if config.blocks_for(workload.longest - 1) > config.num_blocks:
        return None
    served = _serve(llm, workload, "probe", serve_all)
    _note(f"decode at batch {batch}: {served.seconds:.2f} s")
    return served


def load(counter: CompileCounter, model: str, settings: dict[str, Any]) -> tuple[LLM, dict[str, Any]]:
    """The model in an engine that is warmed up, and what that took."""
    before, bytes_before, start = counter.so_far, memory.peak_host_bytes(), time.perf_counter()
    llm = LLM(model, **settings)
    compiles = counter.so_far - before
    return llm, {
        "model": Path(model).name,
        "dtypes": sorted({str(leaf.dtype) for leaf in weights(llm.engine).values()}),
        "seconds": time.perf_counter() - start,
        "compiles": vars(compiles),
        "peak_host_bytes_before": bytes_before,
        "peak_host_bytes": memory.peak_host_bytes(),
        "held_host_bytes": memory.held_host_bytes(),
    }


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
