"""The tokenizer that a GGUF file's metadata describes, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import TokenType

from jaxpaged.models.fields import Fields

PREFIX = "tokenizer.ggml."
KINDS = ("gpt2", "llama")

_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, as the file spells them, and how they join.

    kind: "gpt2" is byte-level BPE, "llama" is SentencePiece. pre: how text is split before merging; "" if not given.
    token_types: `gguf.TokenType` of each token.
    scores: of each token; where a SentencePiece file lists no merges, those of higher scores merge first.
    named_tokens: ids of bos_token, eos_token, unk_token and pad_token, as far as the file gives them.
    """

    kind: str
    architecture: str
    pre: str
    tokens: list[str]
    token_types: list[int]
    scores: list[float] | None
    merges: list[tuple[str, str]] | None
    named_tokens: dict[str, int]
    add_bos_token: bool
    add_eos_token: bool
    add_space_prefix: bool
    chat_template: str | None

    @property
    def special_ids(self) -> list[int]:
        """What `skip_special_tokens` leaves out: control tokens, and those that have a name."""
        control = {token_id for token_id, kind in enumerate(self.token_types) if kind == TokenType.CONTROL}
        return sorted(control.union(self.named_tokens.values()))

    @property
    def user_defined_ids(self) -> list[int]:
        """Tokens that are matched whole in text as special ones are, but shown."""
        special = set(self.special_ids)
        kinds = enumerate(self.token_types)
        return [token_id for token_id, kind in kinds if kind == TokenType.USER_DEFINED and token_id not in special]

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Vocabulary:
        """From a GGUF's metadata. Raises ValueError naming the key that is missing or wrong."""
        get = Fields(fields, PREFIX)
        kind = get.choice("model", KINDS)
        tokens = _array(fields, "tokens", str)
        if not tokens:
            raise ValueError(f"{PREFIX}tokens is missing or empty")
        named = _named_tokens(get, len(tokens))
        return cls(
            kind=kind,
            architecture=_string(fields, "general.architecture", ""),
            pre=_string(fields, f"{PREFIX}pre", ""),
            tokens=tokens,
            token_types=_token_types(fields, len(tokens)),
            scores=_scores(fields, len(tokens)),
            merges=_merges(fields),
            named_tokens=named,
            # SentencePiece text starts with BOS unless the file says otherwise.
            add_bos_token=_adds(get, "bos", named, default=kind == "llama" and "bos_token" in named),
            add_eos_token=_adds(get, "eos", named, default=False),
            add_space_prefix=get.flag("add_space_prefix", True),
            chat_template=_string(fields, "tokenizer.chat_template", None),
        )


def _named_tokens(get: Fields, num_tokens: int) -> dict[str, int]:
    ids = {name: get.token_id(key) for name, key in _NAMED_TOKENS.items()}
    for name, token_id in ids.items():
        if token_id is not None and token_id >= num_tokens:
            raise ValueError(f"{PREFIX}{_NAMED_TOKENS[name]}={token_id}, but there are {num_tokens} tokens")
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _adds(get: Fields, end: str, named: Mapping[str, int], default: bool) -> bool:
    adds = get.flag(f"add_{end}_token", default)
    if adds and f"{end}_token" not in named:
        raise ValueError(f"{PREFIX}add_{end}_token is true, but {PREFIX}{end}_token_id is missing")
    return adds


def _token_types(fields: Mapping[str, Any], num_tokens: int) -> list[int]:
    types = _array(fields, "token_type", int, num_tokens)
    if types is None:
        return [TokenType.NORMAL] * num_tokens
    wrong = set(types) - {0, *TokenType}
    if wrong:
        raise ValueError(f"{PREFIX}token_type has {min(wrong)}, which is not a type of token")
    return types


def _scores(fields: Mapping[str, Any], num_tokens: int) -> list[float] | None:
    scores = _array(fields, "scores", float, num_tokens)
    if scores is not None and not all(map(math.isfinite, scores)):
        raise ValueError(f"{PREFIX}scores has values that are not finite")
    return scores


def _merges(fields: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    merges = _array(fields, "merges", str)
    if merges is None:
        return None
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ValueError(f"{PREFIX}merges has {merge!r:.80}, which is not two tokens with a space between")
        pairs.append((left, right))
    return pairs


def _array(fields: Mapping[str, Any], key: str, item: type, length: int | None = None) -> list | None:
    values = fields.get(PREFIX + key)
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) is item for value in values):
        raise ValueError(f"{PREFIX}{key} is not an array of {item.__name__}")
    if length is not None and len(values) != length:
        raise ValueError(f"{PREFIX}{key} has {len(values)} entries for {length} tokens")
    return values


def _string[Default](fields: Mapping[str, Any], key: str, default: Default) -> str | Default:
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{key}={value!r:.80} is not a string")
    return value
