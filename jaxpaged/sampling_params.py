"""How the tokens of a request are chosen, and when it ends."""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

_MAX_SEED = 2**32 - 1
_MOST_TOKENS = 2**31 - 1
_MOST_STOPS = 16
_LONGEST_STOP = 1000


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Names and meanings are vLLM's. Raises ValueError, naming the field, for a value out of range or of a wrong type.

    In the order in which they change a row of logits:

    allowed_token_ids: no other token is generated. logit_bias: -100 to 100, added to the logits of these token ids.
    min_tokens: the tokens that would end the request are not generated before so many others were.
    repetition_penalty: 0.01 to 100; the logits of tokens of prompt or output are divided by it where positive, else
    multiplied (arXiv:1909.05858). frequency_penalty, presence_penalty: -2 to 2; taken from the logits of each token of
    the output, for each time that it stands there and once.
    temperature: 0 takes the most likely token; above, tokens are drawn from softmax(logits / temperature).
    min_p: 0 to 1; tokens less likely than this share of the likeliest one are not drawn (arXiv:2407.01082).
    top_k: only the k likeliest tokens, and those as likely as the last of them, are drawn; 0 and -1 are all.
    top_p: above 0, at most 1; only the fewest likeliest tokens that together have at least this share of what top_k
    left, and those as likely as the last of them, are drawn (arXiv:1904.09751).

    seed: 0 to 2**32 - 1. The same seed draws the same tokens whatever runs beside the request. None: the engine draws
    one.
    max_tokens: the most tokens to generate, EOS included. stop_token_ids: tokens that end the request, besides EOS.
    ignore_eos: go on after an EOS token; stop_token_ids are heeded still.
    stop: a string or up to 16 of them, of up to 1,000 characters, that end the request where one stands in its text
    behind the first min_tokens tokens; the one that is complete first, and the longest of those that end together. The
    text ends before it, or behind it with include_stop_str_in_output. Needs a tokenizer.
    How many stop_token_ids, and entries of allowed_token_ids or logit_bias, a request may have is set by the engine's
    `EngineConfig`. Lists and mappings are copied.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: Collection[int] | None = None
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_real("temperature", "a finite number of at least 0", lambda x: 0 <= x < math.inf)
        self._check_real("top_p", "a number above 0 and at most 1", lambda x: 0 < x <= 1)
        self._check_real("min_p", "a number from 0 to 1", lambda x: 0 <= x <= 1)
        self._check_real("repetition_penalty", "a number from 0.01 to 100", lambda x: 0.01 <= x <= 100)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_real(name, "a number from -2 to 2", lambda x: -2 <= x <= 2)
        if not is_int(self.top_k) or not -1 <= self.top_k <= _MOST_TOKENS:
            raise ValueError(f"top_k must be an integer of at least 1, or 0 or -1 for all, not {self.top_k!r}")
        if not is_int(self.max_tokens) or not 1 <= self.max_tokens <= _MOST_TOKENS:
            raise ValueError(f"max_tokens must be an integer from 1 to {_MOST_TOKENS}, not {self.max_tokens!r}")
        if not is_int(self.min_tokens) or not 0 <= self.min_tokens <= _MOST_TOKENS:
            raise ValueError(f"min_tokens must be an integer of at least 0, not {self.min_tokens!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, {self.max_tokens}, not {self.min_tokens!r}")
        if self.seed is not None and (not is_int(self.seed) or not 0 <= self.seed <= _MAX_SEED):
            raise ValueError(f"seed must be None or an integer from 0 to {_MAX_SEED}, not {self.seed!r}")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._freeze_stop()
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._freeze_token_ids(name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must not be empty: nothing could be generated")
        if self.logit_bias is not None:
            self._freeze_bias(self.logit_bias)

    @property
    def listed_tokens(self) -> dict[int, float]:
        """Tokens whose logits change by themselves, and what is added: the allowed ones, if any, else the biased."""
        bias = dict(self.logit_bias or {})
        if self.allowed_token_ids is None:
            return bias
        return {token: bias.get(token, 0.0) for token in self.allowed_token_ids}

    def _check_real(self, name: str, what: str, holds: Any) -> None:
        value = getattr(self, name)
        if not _is_real(value) or not holds(value):
            raise ValueError(f"{name} must be {what}, not {value!r}")

    def _freeze_token_ids(self, name: str) -> None:
        ids = getattr(self, name)
        if ids is None:
            return
        if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Collection):
            raise ValueError(f"{name} must be a list of token ids, not {ids!r:.80}")
        for token in ids:
            _check_token_id(name, token)
        object.__setattr__(self, name, tuple(int(token) for token in ids))

    def _freeze_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if isinstance(stop, bytes) or not isinstance(stop, Sequence):
            raise ValueError(f"stop must be a string or a list of them, not {stop!r:.80}")
        for one in stop:
            if not isinstance(one, str) or not 1 <= len(one) <= _LONGEST_STOP:
                raise ValueError(f"stop: a stop string has 1 to {_LONGEST_STOP} characters, not {one!r:.80}")
        if len(stop) > _MOST_STOPS:
            raise ValueError(f"stop must be at most {_MOST_STOPS} strings, not {len(stop)}")
        object.__setattr__(self, "stop", tuple(stop))

    def _freeze_bias(self, bias: Any) -> None:
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias must be a mapping of token ids to numbers, not {bias!r:.80}")
        for token, value in bias.items():
            _check_token_id("logit_bias", token)
            if not _is_real(value) or not -100 <= value <= 100:
                raise ValueError(f"logit_bias[{token}] must be a number from -100 to 100, not {value!r}")
        copied = {int(token): float(value) for token, value in bias.items()}
        object.__setattr__(self, "logit_bias", MappingProxyType(copied))


def is_int(value: Any) -> bool:
    """Whether `value` is an integer of any library; True and False are not."""
    if isinstance(value, bool | np.bool_):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _check_token_id(name: str, token: Any) -> None:
    if not is_int(token) or token < 0:
        raise ValueError(f"{name}: {token!r} is not a token id")


def _is_real(value: Any) -> bool:
    if isinstance(value, bool | str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
