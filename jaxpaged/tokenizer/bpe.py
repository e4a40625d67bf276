"""What both kinds of BPE check and build alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxpaged.tokenizer.vocabulary import PREFIX


def ids_by_token(tokens: Sequence[str]) -> dict[str, int]:
    """The id of each token. Raises ValueError where two are spelled alike: one of them could not be decoded."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        first = next(token_id for token_id, token in enumerate(tokens) if ids[token] != token_id)
        token = tokens[first]
        raise ValueError(f"{PREFIX}tokens has {token!r:.80} twice, as {first} and {ids[token]}")
    return ids


def check_merges(merges: Iterable[tuple[str, str]], ids: dict[str, int]) -> None:
    """Raises ValueError for a merge of tokens, or into a token, that the vocabulary lacks."""
    for left, right in merges:
        if not (left in ids and right in ids and left + right in ids):
            raise ValueError(f"{PREFIX}merges has {f'{left} {right}'!r:.80}, which names a token that is not there")


def merges_by_score(ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others; first the tokens of the highest scores.

    Of one score, the longest left half and then the longest right half is first, and then the lowest id.
    """
    ways = [
        (score, cut, len(token) - cut, token)
        for (token, score) in zip(ids, scores, strict=True)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ids and token[cut:] in ids
    ]
    ways.sort(key=lambda way: way[:3], reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, _, token in ways]
