"""The workloads, exactly defined, so that other engines can be given the same token ids and lengths.

All draws are those of Python's `random.Random(seed)`, the same in every version since 3.2, in this order:
1. `shared_prefix` token ids, each `randint(lowest, highest)`, if there are any;
2. for each request, its prompt: the length `randint(*prompt_len)`, then so many token ids `randint(lowest, highest)`,
   which stand behind the shared prefix;
3. for each request, its output length `randint(*output_len)`;
4. if there is a `rate`, for each request `expovariate(rate)`: seconds from the arrival before it to its own.
Token ids are 100 to 40,000, or, in a vocabulary that has not so many, any; nano-vllm's are 0 to 10,000. Requests are
greedy and ignore EOS, so an engine has no choice in how many tokens there are.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

Name = Literal["throughput", "latency", "prefill", "shared-prefix", "serve-like"]
NAMES: tuple[Name, ...] = get_args(Name)
Range = tuple[int, int]  # both ends included


@dataclass(frozen=True)
class Definition:
    """What a workload is drawn from. Lengths in tokens, rate in requests a second (None: all come at once)."""

    name: str
    requests: int
    prompt_len: Range
    output_len: Range
    shared_prefix: int = 0
    rate: float | None = None
    seed: int = 0
    token_ids: Range = (100, 40_000)


@dataclass(frozen=True)
class BenchRequest:
    """max_tokens: how many tokens it gets. arrival: in seconds from the start of the workload."""

    prompt_token_ids: list[int]
    max_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    definition: Definition
    requests: list[BenchRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return max(len(request.prompt_token_ids) + request.max_tokens for request in self.requests)


# `throughput` is the standing workload: 8,864 prompt tokens and 5,058 output tokens.
DEFINITIONS: Mapping[str, Definition] = {
    "throughput": Definition("throughput", requests=64, prompt_len=(32, 256), output_len=(32, 128)),
    "latency": Definition("latency", requests=1, prompt_len=(32, 32), output_len=(128, 128)),
    "prefill": Definition("prefill", requests=1, prompt_len=(1024, 1024), output_len=(1, 1)),
    "shared-prefix": Definition(
        "shared-prefix", requests=64, prompt_len=(16, 64), output_len=(16, 32), shared_prefix=256
    ),
    "serve-like": Definition("serve-like", requests=64, prompt_len=(32, 256), output_len=(32, 128), rate=2.0),
}
NANO = Definition(
    "throughput-nano", requests=256, prompt_len=(100, 1024), output_len=(100, 1024), token_ids=(0, 10_000)
)
"""The load of nano-vllm's bench.py, in its order of draws: 133,966 output tokens."""


def draw(definition: Definition, vocab_size: int) -> Workload:
    """The workload for a model of `vocab_size` token ids. Raises ValueError for sizes that are no workload."""
    _check(definition)
    lowest, highest = definition.token_ids
    if highest >= vocab_size:
        lowest, highest = 0, min(highest, vocab_size - 1)
    definition = replace(definition, token_ids=(lowest, highest))
    rng = random.Random(definition.seed)
    prefix = [rng.randint(lowest, highest) for _ in range(definition.shared_prefix)]
    prompts = [
        prefix + [rng.randint(lowest, highest) for _ in range(rng.randint(*definition.prompt_len))]
        for _ in range(definition.requests)
    ]
    lengths = [rng.randint(*definition.output_len) for _ in prompts]
    arrivals, now = [], 0.0
    for _ in prompts:
        now += rng.expovariate(definition.rate) if definition.rate else 0.0
        arrivals.append(now)
    return Workload(definition, [BenchRequest(*each) for each in zip(prompts, lengths, arrivals, strict=True)])


def write(workload: Workload, path: Path) -> None:
    """As JSON, for other engines: the definition, and for each request its token ids, output length and arrival."""
    content = {
        "definition": describe(workload.definition),
        "greedy": True,
        "ignore_eos": True,
        "requests": [asdict(request) for request in workload.requests],
    }
    path.write_text(json.dumps(content) + "\n")


def describe(definition: Definition) -> dict[str, Any]:
    """The definition as JSON holds it: ranges as lists."""
    return json.loads(json.dumps(asdict(definition)))


def _check(definition: Definition) -> None:
    if definition.requests < 1:
        raise ValueError(f"requests must be at least 1, not {definition.requests}")
    if definition.shared_prefix < 0:
        raise ValueError(f"prefix-len must be at least 0, not {definition.shared_prefix}")
    if definition.rate is not None and not 0 < definition.rate < float("inf"):
        raise ValueError(f"rate must be above 0 requests a second, not {definition.rate}")
    for name, (fewest, most) in {"prompt-len": definition.prompt_len, "output-len": definition.output_len}.items():
        if not 1 <= fewest <= most:
            raise ValueError(f"{name} must be from 1 on and not fall, not {fewest}-{most}")
