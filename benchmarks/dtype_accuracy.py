"""How far the tokens of a bfloat16 model are those of a float32 one, over the golden prompts.

The golden tokens are transformers' greedy ones in float32 (tests/golden/smollm2_greedy.json). The bfloat16 model is
asked for its best token after each golden prefix, so one difference does not make all that follow different. A float32
model is asked the same, as the check of the check.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkpoints
from benchmarks.tables import write_results
from jaxpaged.models import causal_attend

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "smollm2_greedy.json"


def best_tokens(model: Any, token_ids: list[int], padded_len: int) -> np.ndarray:
    """The model's best token after each prefix of `token_ids`, i32 [T]."""
    length = len(token_ids)
    tokens = np.zeros(padded_len, np.int32)
    tokens[:length] = token_ids
    positions = np.where(np.arange(padded_len) < length, np.arange(padded_len), -1)
    return np.asarray(_argmax(model, tokens, positions))[:length]


@jax.jit
def _argmax(model: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.argmax(model.logits(model(tokens, positions, causal_attend(positions))), axis=-1)


def measure(dtype: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    model = checkpoints.load(checkpoints.packaged(checkpoints.SMOLLM2), dtype)[1]
    padded_len = max(len(case["prompt_token_ids"] + case["token_ids"]) for case in cases)
    agrees, margins = [], []
    for case in cases:
        prompt, golden = case["prompt_token_ids"], case["token_ids"]
        best = best_tokens(model, prompt + golden[:-1], padded_len)[len(prompt) - 1 :]
        agrees.append(best == np.asarray(golden))
        margins.append(case["margins"])
    agree = np.concatenate(agrees)
    return {
        "dtype": dtype,
        "tokens": agree.size,
        "agree": int(agree.sum()),
        "prompts_whole": sum(bool(each.all()) for each in agrees),
        "prompts": len(cases),
        "largest_margin_of_a_difference": float(max(np.concatenate(margins)[~agree], default=0.0)),
    }


def main() -> None:
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    rows = [measure(dtype, cases) for dtype in ("float32", "bfloat16")]
    lines = [
        "Of SmolLM2-135M's best tokens after each golden prefix, those that are the golden ones. A margin is the logit",
        "of the best token less that of the second, in float32.",
        "",
        "| weights | tokens that agree | prompts that agree wholly | largest margin where they do not |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['dtype']} | {row['agree']} of {row['tokens']} ({row['agree'] / row['tokens']:.1%}) "
        f"| {row['prompts_whole']} of {row['prompts']} | {row['largest_margin_of_a_difference']:.2f} |"
        for row in rows
    ]
    write_results("dtype_accuracy", rows, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
