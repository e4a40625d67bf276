"""SentencePiece's BPE: "▁" stands for a space, and what no token spells becomes tokens of single bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jaxpaged.tokenizer.bpe import check_merges, ids_by_token, merges_by_score
from jaxpaged.tokenizer.vocabulary import PREFIX, Vocabulary

_SPACE = "▁"
_GEMMA = ("gemma", "gemma2", "gemma3")


def sentencepiece_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a "llama" vocabulary, without its special tokens. Raises ValueError naming the key."""
    return _gemma(vocabulary) if vocabulary.architecture in _GEMMA else _llama(vocabulary)


def _llama(vocabulary: Vocabulary) -> Tokenizer:
    ids = ids_by_token(vocabulary.tokens)
    tokenizer = Tokenizer(BPE(ids, _merges(vocabulary, ids, vocabulary.scores), fuse_unk=True, byte_fallback=True))
    spaces: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not vocabulary.add_space_prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False)
    elif vocabulary.architecture == "phi3":
        # Here text that starts with a space gets one more.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    if vocabulary.add_space_prefix:
        spaces.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(spaces)
    return tokenizer


def _gemma(vocabulary: Vocabulary) -> Tokenizer:
    # The file spells runs of spaces as text.
    tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in vocabulary.tokens]
    ids = ids_by_token(tokens)
    # Its scores do not say what merges first; the order of the tokens does.
    merges = _merges(vocabulary, ids, [-float(place) for place in range(len(tokens))])
    unk = vocabulary.named_tokens.get("unk_token")
    tokenizer = Tokenizer(
        BPE(ids, merges, fuse_unk=True, byte_fallback=True, unk_token=None if unk is None else tokens[unk])
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges(vocabulary: Vocabulary, ids: dict[str, int], scores: list[float] | None) -> list[tuple[str, str]]:
    if vocabulary.merges is not None:
        check_merges(vocabulary.merges, ids)
        return vocabulary.merges
    if scores is None:
        raise ValueError(f"{PREFIX}scores and {PREFIX}merges are missing: one of them is needed")
    return merges_by_score(ids, scores)
