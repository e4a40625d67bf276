"""The host's side of a request: checked input on its way to the device, and what has come back so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpaged.engine.config import EngineConfig
from jaxpaged.engine.state import NO_TOKEN, NewRequests
from jaxpaged.outputs import FinishReason
from jaxpaged.sampling_params import SamplingParams, is_int


@dataclass
class Request:
    """A request as the host knows it: the device may be a run ahead. Times are seconds of `time.perf_counter`."""

    seq: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    arrival_time: float
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


def new_requests(requests: Sequence[Request], rows: Sequence[int], width: int, config: EngineConfig) -> NewRequests:
    """`requests` and the rows they go to as the arrays that `enqueue` takes, padded to `width` of them."""
    row = np.full(width, config.num_rows, np.int32)
    seq, prompt_len, most = (np.zeros(width, np.int32) for _ in range(3))
    tokens = np.zeros((width, config.max_model_len), np.int32)
    stop_ids = np.full((width, config.max_stop_ids), NO_TOKEN, np.int32)
    temperature, seed = np.zeros(width, np.float32), np.zeros(width, np.uint32)
    for i, request in enumerate(requests):
        length = len(request.prompt_token_ids)
        row[i], seq[i], prompt_len[i] = rows[i], request.seq, length
        tokens[i, :length] = request.prompt_token_ids
        most[i] = max_total_len(length, request.params, config)
        stop_ids[i, : len(request.stop_ids)] = request.stop_ids
        temperature[i] = min(request.params.temperature, float(np.finfo(np.float32).max))
        seed[i] = request.seed
    columns = (row, seq, tokens, prompt_len, most, stop_ids, temperature, seed)
    return NewRequests(*map(jnp.asarray, columns))
