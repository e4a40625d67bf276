"""Byte-level BPE: text is split by a pattern, spelled with one character for each byte, and merged."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from jaxpaged.tokenizer.alphabet import BYTE_TO_CHAR
from jaxpaged.tokenizer.bpe import check_merges, ids_by_token
from jaxpaged.tokenizer.vocabulary import PREFIX, Vocabulary

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_WORD_WITH_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
# "camelCase" is two words.
_LOWER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_NOT_MARKS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_SYMBOLS_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (_CONTRACTION, _WORD, _DIGITS, _SYMBOLS, _SPACES)
_QWEN2 = (_CONTRACTION, _WORD, _DIGIT, _SYMBOLS, _SPACES)
_QWEN35 = (_CONTRACTION, _WORD_WITH_MARKS, _DIGIT, _SYMBOLS_NOT_MARKS, _SPACES)
_TEKKEN = (_LOWER_WORD, _UPPER_WORD, _DIGIT, _SYMBOLS_WITH_SLASHES, _SPACES)
_GPT4O = (f"{_LOWER_WORD}{_CONTRACTION}?", f"{_UPPER_WORD}{_CONTRACTION}?", _DIGITS, _SYMBOLS_WITH_SLASHES, _SPACES)

# How each kind splits text. A kind that is not here would be split wrongly in silence, so it is refused.
_PATTERNS = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe": _LLAMA3,
    "qwen2 deepseek-r1-qwen kormo megrez": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O,
}
_PATTERN_OF = {kind: "|".join(parts) for kinds, parts in _PATTERNS.items() for kind in kinds.split()}
# GPT-2's pattern is built into tokenizers. "default" and "smollm" are here because transformers reads them so.
_GPT2_KINDS = "gpt-2 default smollm phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling"
_AS_GPT2 = frozenset(_GPT2_KINDS.split())

_ALPHABET = frozenset(BYTE_TO_CHAR.values())

PRE_KINDS = tuple(sorted(_AS_GPT2.union(_PATTERN_OF)))


def byte_level_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a "gpt2" vocabulary, without its special tokens. Raises ValueError naming the key."""
    pre_tokenizer = _pre_tokenizer(vocabulary.pre)
    if vocabulary.merges is None:
        raise ValueError(f"{PREFIX}merges is missing")
    # What is matched whole in text is spelled as text.
    whole = {*vocabulary.special_ids, *vocabulary.user_defined_ids}
    tokens = enumerate(vocabulary.tokens)
    ids = ids_by_token([token if token_id in whole else _in_alphabet(token) for token_id, token in tokens])
    check_merges(vocabulary.merges, ids)
    tokenizer = Tokenizer(BPE(ids, vocabulary.merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(kind: str) -> PreTokenizer:
    if kind in _AS_GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind not in _PATTERN_OF:
        problem = f"pre={kind!r:.80} is not supported" if kind else "pre is missing"
        raise ValueError(f"{PREFIX}{problem} (supported: {', '.join(PRE_KINDS)})")
    split = pre_tokenizers.Split(Regex(_PATTERN_OF[kind]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _in_alphabet(token: str) -> str:
    """Some files spell some tokens as text."""
    return token if _ALPHABET.issuperset(token) else "".join(BYTE_TO_CHAR[byte] for byte in token.encode())
