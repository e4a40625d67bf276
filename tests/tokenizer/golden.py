"""Compare a tokenizer with what transformers made of the same file (tests/golden/make_tokenizer.py)."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

_FOLDER = Path(__file__).parents[1] / "golden"


def read(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((_FOLDER / f"tokenizer_{name}.json.gz").read_bytes()))


def check_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str], expected: list[list[int]]) -> None:
    """Of each text, alone and all in a batch."""
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer(text)["input_ids"] == ids, f"{text!r}"
    assert tokenizer(texts)["input_ids"] == expected


def check_decoded(
    tokenizer: PreTrainedTokenizerFast,
    all_ids: list[list[int]],
    expected: list[list[str | None]],
    texts: list[str] | None = None,
) -> None:
    """Without special tokens and with them; the golden file gives null for what decodes to the text itself."""
    for place, (ids, decoded) in enumerate(zip(all_ids, expected, strict=True)):
        for skip, text in zip((True, False), decoded, strict=True):
            if text is None:
                text = texts[place]
            assert tokenizer.decode(ids, skip_special_tokens=skip) == text, f"{ids}, {skip=}"


def check_all(tokenizer: PreTrainedTokenizerFast, expected: dict[str, Any]) -> None:
    """Everything in the golden file of one model."""
    assert len(tokenizer) == expected["num_tokens"]
    assert {name: getattr(tokenizer, f"{name}_token_id") for name in expected["named"]} == expected["named"]
    assert digests(tokenizer) == expected["digests"]
    texts = expected["texts"]
    check_ids(tokenizer, texts, expected["ids"])
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    check_decoded(tokenizer, bare, expected["decoded"], texts)
    check_decoded(tokenizer, expected["token_ids"], expected["token_ids_decoded"])
    for chat in expected["chats"]:
        text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=chat["ask"])
        assert text == chat["text"]


def digests(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Of the whole vocabulary: its spelling, how it merges, what is special, and what each id decodes to."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = backend["model"], backend["added_tokens"]
    decoded = [
        [tokenizer.decode([token_id], skip_special_tokens=skip) for skip in (True, False)]
        for token_id in range(len(tokenizer))
    ]
    values = {
        "vocabulary": sorted(model["vocab"].items(), key=lambda item: item[1]),
        "merges": model["merges"],
        "added": [[token["id"], token["content"], token["special"]] for token in added],
        "decoded": decoded,
    }
    return {
        name: hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()
        for name, value in values.items()
    }
