"""How an engine is asked, in lines: requests on standard input, one JSON object for each on standard output.

`python -m benchmarks.peers.engines.NAME WORKLOAD MODEL DTYPE` loads, warms up and says it is ready: its load time in
`seconds`, and what there is to know about it. Then it waits, and answers

- `run N` with the first N requests of the workload: `seconds`, `prompt_tokens`, and the outputs' `token_ids`;
- `run1` with one request of 8 prompt tokens and 64 output tokens: `seconds_per_token` of its decodes, and `token_ids`.

Runs in the environment of any engine (Python 3.11 or later) and needs nothing of it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

PROMPT1, OUTPUT1 = 8, 64
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 16, 8

TokenIds = list[list[int]]
Generate = Callable[[Sequence[list[int]], Sequence[int]], TokenIds]
"""(prompts, lengths) to the greedy outputs, each of exactly its length, EOS ignored."""


@dataclass(frozen=True)
class Engine:
    """A loaded engine. facts: `version`, `threads` and, where something must be said, `notes`, a list of texts."""

    generate: Generate
    facts: dict[str, Any] = field(default_factory=dict)


def serve(load: Callable[[Path, str], Engine]) -> None:
    """Load with the arguments of the command line, then answer until standard input ends."""
    workload, model, dtype = sys.argv[1:]
    # Engines and their libraries write to standard output, too: they get standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = json.loads(Path(workload).read_text())["requests"]
    prompts = [request["prompt_token_ids"] for request in requests]
    lengths = [request["max_tokens"] for request in requests]
    start = time.perf_counter()
    engine = load(Path(model), dtype)
    seconds = time.perf_counter() - start
    engine.generate(prompts[:_WARM_UP_REQUESTS], [_WARM_UP_TOKENS] * len(prompts[:_WARM_UP_REQUESTS]))
    _say(answers, {"seconds": seconds, "dtype": dtype, **engine.facts})
    for line in sys.stdin:
        command, *count = line.split()
        if command == "run1":
            _say(answers, _run1(engine, prompts[0][:PROMPT1]))
        else:
            _say(answers, _run(engine, prompts[: int(count[0])], lengths[: int(count[0])]))


def _run(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    start = time.perf_counter()
    token_ids = engine.generate(prompts, lengths)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "prompt_tokens": sum(map(len, prompts)), "token_ids": token_ids}


def _run1(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Decodes alone: what 64 tokens take, less what the first of them takes, which is the prompt's."""
    pairs = [(_run(engine, [prompt], [1]), _run(engine, [prompt], [OUTPUT1])) for _ in range(3)]
    seconds = median(whole["seconds"] - first["seconds"] for first, whole in pairs)
    return {"seconds_per_token": seconds / (OUTPUT1 - 1), "token_ids": pairs[0][1]["token_ids"]}


def _say(answers: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)
