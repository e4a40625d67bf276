"""The host's side of a request: checked input on its way to the device, and what has come back so far."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.sampling import Sampling
from jaxpaged.engine.state import NO_TOKEN, NewRequests
from jaxpaged.outputs import FinishReason
from jaxpaged.sampling_params import SamplingParams, is_int

_MOST_TOTAL_LEN = 2**30  # far above any, and far below what int32 holds


@dataclass
class Request:
    """A request as the host knows it: the device may be a run ahead. Times are seconds of `time.perf_counter`.

    cache_salt: the number that the engine gave to the caller's. num_cached_tokens: of the prompt, those that came from
    the prefix cache when the request was first admitted; None before.
    """

    seq: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    arrival_time: float
    cache_salt: int = 0
    num_cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def total_len(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


@dataclass(frozen=True)
class Update:
    """What one run brought for a request: its new tokens, and why it ended, if it did."""

    seq: int
    token_ids: list[int]
    finish_reason: FinishReason | None


def check_prompt(prompt_token_ids: Any, vocab_size: int) -> list[int]:
    """The prompt as a list of ints. Raises ValueError if it is empty or not token ids of the vocabulary."""
    if hasattr(prompt_token_ids, "__array__"):
        prompt_token_ids = np.asarray(prompt_token_ids)
    if isinstance(prompt_token_ids, str | bytes) or not isinstance(prompt_token_ids, Sequence | np.ndarray):
        raise ValueError(f"prompt_token_ids must be a sequence of token ids, not {type(prompt_token_ids).__name__}")
    if isinstance(prompt_token_ids, np.ndarray) and prompt_token_ids.ndim != 1:
        raise ValueError(f"prompt_token_ids must have one axis, not the shape {prompt_token_ids.shape}")
    if len(prompt_token_ids) == 0:
        raise ValueError("prompt_token_ids is empty: a prompt needs at least one token")
    for index, token in enumerate(prompt_token_ids):
        if not is_int(token):
            raise ValueError(f"prompt_token_ids[{index}] must be an integer, not {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt_token_ids[{index}] = {token} is outside the vocabulary of {vocab_size} tokens")
    return [int(token) for token in prompt_token_ids]


def max_total_len(prompt_len: int, params: SamplingParams, config: EngineConfig) -> int:
    """The length at which the request finishes at the latest."""
    return min(prompt_len + int(params.max_tokens), config.max_model_len)


def why_refused(prompt_len: int, params: SamplingParams, config: EngineConfig) -> str | None:
    """Why a request can never run here; None if it can."""
    if prompt_len + 1 > config.max_model_len:
        return f"needs {prompt_len + 1} tokens, max_model_len is {config.max_model_len}"
    # The last token is never consumed, so it needs no place in the pool.
    most_blocks = config.blocks_for(max_total_len(prompt_len, params, config) - 1)
    if most_blocks > config.num_blocks:
        return f"needs {most_blocks} blocks, num_blocks is {config.num_blocks}"
    return None


def check_params(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int, config: EngineConfig) -> None:
    """Raise ValueError, naming the field, if the model or the engine cannot do what `params` ask."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise ValueError(f"{name}: {token} is outside the vocabulary of {vocab_size} tokens")
    stop_ids, listed = stop_ids_of(params, eos_token_ids), params.listed_tokens
    if len(stop_ids) > config.max_stop_ids:
        raise ValueError(f"stop_token_ids and EOS are {len(stop_ids)} ids, max_stop_ids is {config.max_stop_ids}")
    if len(listed) > config.max_listed_tokens:
        name = "logit_bias" if params.allowed_token_ids is None else "allowed_token_ids"
        raise ValueError(f"{name} has {len(listed)} ids, max_listed_tokens is {config.max_listed_tokens}")
    if params.min_tokens and params.allowed_token_ids is not None and set(listed) <= set(stop_ids):
        raise ValueError(
            "allowed_token_ids are stop ids alone, and min_tokens forbids these: nothing could be generated"
        )


def stop_ids_of(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The token ids that end the request, each once."""
    eos = () if params.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys([*eos, *(params.stop_token_ids or ())]))


def new_requests(requests: Sequence[Request], rows: Sequence[int], width: int, config: EngineConfig) -> NewRequests:
    """`requests` and the rows they go to as the arrays that `enqueue` takes, padded to `width` of them."""
    row = np.full(width, config.num_rows, np.int32)
    seq, prompt_len, most, salt = (np.zeros(width, np.int32) for _ in range(4))
    tokens = np.zeros((width, config.max_model_len), np.int32)
    stop_ids = np.full((width, config.max_stop_ids), NO_TOKEN, np.int32)
    listed_ids = np.full((width, config.max_listed_tokens), NO_TOKEN, np.int32)
    listed_bias = np.zeros((width, config.max_listed_tokens), np.float32)
    for i, request in enumerate(requests):
        length, own_list = len(request.prompt_token_ids), request.params.listed_tokens
        row[i], seq[i], prompt_len[i] = rows[i], request.seq, length
        tokens[i, :length] = request.prompt_token_ids
        most[i], salt[i] = max_total_len(length, request.params, config), request.cache_salt
        stop_ids[i, : len(request.stop_ids)] = request.stop_ids
        listed_ids[i, : len(own_list)], listed_bias[i, : len(own_list)] = list(own_list), list(own_list.values())
    return NewRequests(
        row=jnp.asarray(row),
        seq=jnp.asarray(seq),
        tokens=jnp.asarray(tokens),
        prompt_len=jnp.asarray(prompt_len),
        max_total_len=jnp.asarray(most),
        stop_ids=jnp.asarray(stop_ids),
        cache_salt=jnp.asarray(salt),
        sampling=_sampling(requests, width),
        listed_ids=jnp.asarray(listed_ids),
        listed_bias=jnp.asarray(listed_bias),
    )


def _sampling(requests: Sequence[Request], width: int) -> Sampling:
    params = [request.params for request in requests]

    def column(values: Iterable[float], dtype: DTypeLike = np.float32) -> Array:
        padded = np.zeros(width, dtype)
        padded[: len(params)] = np.fromiter(values, dtype)
        return jnp.asarray(padded)

    def numbers(name: str) -> Array:
        """What is too large for a float32 is its largest."""
        most = float(np.finfo(np.float32).max)
        return column(min(float(getattr(own, name)), most) for own in params)

    return Sampling(
        temperature=numbers("temperature"),
        seed=column((request.seed for request in requests), np.uint32),
        top_k=column((max(0, own.top_k) for own in params), np.int32),
        top_p=numbers("top_p"),
        min_p=numbers("min_p"),
        repetition_penalty=numbers("repetition_penalty"),
        presence_penalty=numbers("presence_penalty"),
        frequency_penalty=numbers("frequency_penalty"),
        min_total_len=column((_min_total_len(request) for request in requests), np.int32),
        has_list=column((bool(own.listed_tokens) for own in params), bool),
        only_listed=column((own.allowed_token_ids is not None for own in params), bool),
    )


def _min_total_len(request: Request) -> int:
    """0 for a request that may stop at once."""
    least = request.params.min_tokens
    return len(request.prompt_token_ids) + min(least, _MOST_TOTAL_LEN) if least else 0
