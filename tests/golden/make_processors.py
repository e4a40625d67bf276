"""Write `processors.npz`: what transformers' logits processors make of the same logits under drawn parameters.

In the environment of make_models.py:

    ref/bin/python tests/golden/make_processors.py

It holds `params`, a JSON list of sets, each with the row of logits and tokens it is for; `logits` f32 [rows, vocab];
`tokens` i32 [rows, length], of which the first `prompt_len` are the prompt; `scores` f32 [sets, vocab], the processed
logits, -inf where a token is left out. The processors stand in the order of vLLM's sampler.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

ROWS, VOCAB, LENGTH, PROMPT_LEN, SETS = 24, 200, 30, 18, 400
STOP_IDS = [3, 77]


def draw(rng: np.random.Generator, row: int) -> dict[str, object]:
    """A set of parameters, of which each is left out half of the time."""
    drawn = {
        "temperature": float(rng.choice([0.3, 0.7, 1.0, 1.7])),
        "top_k": int(rng.choice([1, 2, 5, 40, 199, 200, 10_000])),
        "top_p": float(rng.choice([0.05, 0.5, 0.9, 0.99])),
        "min_p": float(rng.choice([0.01, 0.1, 0.5, 1.0])),
        "repetition_penalty": float(rng.choice([0.5, 1.1, 1.8])),
        "logit_bias": {int(t): float(rng.uniform(-20, 20)) for t in rng.choice(VOCAB, 5, replace=False)},
        "min_tokens": int(rng.choice([1, 12, 13, 20])),
    }
    return {name: value for name, value in drawn.items() if rng.random() < 0.5} | {"row": row}


def processors(params: dict) -> LogitsProcessorList:
    made = LogitsProcessorList()
    if "min_tokens" in params:
        made.append(MinNewTokensLengthLogitsProcessor(PROMPT_LEN, params["min_tokens"], STOP_IDS, device="cpu"))
    if "logit_bias" in params:
        made.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params["logit_bias"].items()]))
    if "repetition_penalty" in params:
        made.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    made.append(TemperatureLogitsWarper(params.get("temperature", 1.0)))
    if "min_p" in params:
        made.append(MinPLogitsWarper(params["min_p"]))
    if "top_k" in params:
        made.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        made.append(TopPLogitsWarper(params["top_p"]))
    return made


def main() -> None:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((ROWS, VOCAB)) * rng.choice([0.5, 2, 6], (ROWS, 1))).astype(np.float32)
    # Few different ones, so that tokens come again in prompt and output.
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)) // 7 * 7
    params = [draw(rng, int(rng.integers(ROWS))) for _ in range(SETS)]
    scores = [
        processors(own)(torch.tensor(tokens[own["row"]][None]), torch.tensor(logits[own["row"]][None]))[0].numpy()
        for own in params
    ]
    np.savez_compressed(
        Path(__file__).with_name("processors.npz"),
        params=json.dumps({"prompt_len": PROMPT_LEN, "stop_ids": STOP_IDS, "sets": params}),
        logits=logits,
        tokens=tokens.astype(np.int32),
        scores=np.stack(scores).astype(np.float32),
    )


if __name__ == "__main__":
    main()
