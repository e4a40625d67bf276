"""Text that streams: token ids in, and out comes the text that no later token can change."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable
from typing import Protocol

from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from jaxpaged.tokenizer.alphabet import CHAR_TO_BYTE

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Decodes one request's output while it is generated.

    The texts of all `add` calls and of `finish` together are `tokenizer.decode(token_ids, skip_special_tokens=...)` of
    all ids together. What is held back: in byte-level vocabularies the bytes of an unfinished character, three at most;
    in SentencePiece ones a run of byte tokens until it ends, since one wrong byte changes the text of the whole run;
    with a decoder of another kind everything, until `finish`. The work for a token does not grow with the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, skip_special_tokens: bool = True) -> None:
        self._text = _text_of(tokenizer, skip_special_tokens)

    def add(self, token_ids: Iterable[int]) -> str:
        """The next ids, any number of them -> the text that is certain now. Ids beyond the vocabulary have no text."""
        return self._text.add(int(token_id) for token_id in token_ids)

    def finish(self) -> str:
        """What was held back. To be called once, after the last token."""
        return self._text.finish()


class _Text(Protocol):
    def add(self, token_ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


def _text_of(tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool) -> _Text:
    decoder = tokenizer.backend_tokenizer.decoder
    shown = _Shown(tokenizer, skip_special_tokens)
    if tokenizer.clean_up_tokenization_spaces:  # changes text across tokens
        return _AtTheEnd(tokenizer, skip_special_tokens)
    if isinstance(decoder, decoders.ByteLevel):
        return _ByteLevel(shown)
    if _is_token_by_token(decoder):
        return _TokenByToken(shown, decoder)
    return _AtTheEnd(tokenizer, skip_special_tokens)


def _is_token_by_token(decoder: decoders.Decoder | None) -> bool:
    """Whether it turns each token into text by itself, but for runs of byte tokens and a space in front of it all."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    match [step["type"] for step in steps]:
        case ["Metaspace"] | ["Replace", "ByteFallback", "Fuse"]:
            return True
        case ["Replace", "ByteFallback", "Fuse", "Strip"]:
            return steps[-1]["start"] <= 1 and steps[-1]["stop"] == 0
    return False


class _Shown:
    """Which tokens `decode` turns into text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip_special_tokens = skip_special_tokens

    def tokens(self, token_ids: Iterable[int]) -> list[str]:
        tokens = [self._backend.id_to_token(token_id) for token_id in token_ids if not self._is_skipped(token_id)]
        return [token for token in tokens if token is not None]

    def _is_skipped(self, token_id: int) -> bool:
        # Asked of one id, since a list of all special tokens takes milliseconds to make and a request may be short.
        if not self._skip_special_tokens:
            return False
        without = self._backend.decode([token_id], skip_special_tokens=True)
        return without != self._backend.decode([token_id], skip_special_tokens=False)


class _ByteLevel:
    def __init__(self, shown: _Shown) -> None:
        self._shown = shown
        self._utf8 = getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(_bytes, self._shown.tokens(token_ids))))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def _bytes(token: str) -> bytes:
    """Of a token in the alphabet; a token that is not in it was added as text."""
    try:
        return bytes(CHAR_TO_BYTE[char] for char in token)
    except KeyError:
        return token.encode()


class _TokenByToken:
    def __init__(self, shown: _Shown, decoder: decoders.Decoder) -> None:
        self._shown = shown
        self._decoder = decoder
        # In front of what comes next, so that it is not taken for the start of the text: the last token that is not ""
        # and the last one.
        self._context: list[str] = []
        self._held: list[str] = []

    def add(self, token_ids: Iterable[int]) -> str:
        tokens = self._shown.tokens(token_ids)
        ends = [place for place, token in enumerate(tokens, 1) if not _BYTE_TOKEN.fullmatch(token)]
        closed = ends[-1] if ends else 0
        self._held += tokens[:closed]
        text = self.finish() if closed else ""
        self._held += tokens[closed:]
        return text

    def finish(self) -> str:
        tokens = self._context + self._held
        text = self._decoder.decode(tokens)[len(self._decoder.decode(self._context)) :]
        self._context = [token for token in tokens if token][-1:] + tokens[-1:]
        self._held = []
        return text


class _AtTheEnd:
    def __init__(self, tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []

    def add(self, token_ids: Iterable[int]) -> str:
        self._token_ids += token_ids
        return ""

    def finish(self) -> str:
        # Of a list of ids `decode` makes a string, of a list of lists a list: its signature leaves that open.
        return str(self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens))
