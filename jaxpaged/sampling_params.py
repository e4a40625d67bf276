"""How the tokens of a request are chosen, and when it ends."""

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

_MAX_SEED = 2**32 - 1
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Names and meanings are vLLM's. Raises ValueError, naming the field, for a value out of range or of a wrong type.

    temperature: 0 takes the most likely token; above, tokens are drawn from softmax(logits / temperature).
    max_tokens: the most tokens to generate, EOS included.
    seed: 0 to 2**32 - 1. The same seed draws the same tokens whatever runs beside the request. None: the engine draws
    one.
    ignore_eos: go on after an EOS token.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not _is_real(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number of at least 0, not {self.temperature!r}")
        if not is_int(self.max_tokens) or not 1 <= self.max_tokens <= _MOST_TOKENS:
            raise ValueError(f"max_tokens must be an integer from 1 to {_MOST_TOKENS}, not {self.max_tokens!r}")
        if self.seed is not None and (not is_int(self.seed) or not 0 <= self.seed <= _MAX_SEED):
            raise ValueError(f"seed must be None or an integer from 0 to {_MAX_SEED}, not {self.seed!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")


def is_int(value: Any) -> bool:
    """Whether `value` is an integer of any library; True and False are not."""
    if isinstance(value, bool | np.bool_):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_real(value: Any) -> bool:
    if isinstance(value, bool | str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
