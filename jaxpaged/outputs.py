"""What a finished request gives back. The names are vLLM's."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `token_ids` include the EOS token that ended it; `text` does not show special tokens.

    finish_reason: "stop" after an EOS token or one of `stop_token_ids`, "length" at max_tokens or max_model_len,
    "abort" if it was given up. text is "" without a tokenizer.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class RequestMetrics:
    """When the host learned of it, in seconds of `time.perf_counter`."""

    arrival_time: float
    first_token_time: float
    finished_time: float


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. `prompt` is None where token ids were given.

    num_cached_tokens: of the prompt, those that came from the prefix cache and were not computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True)
class StreamedOutput:
    """A piece of a completion: text and tokens, new and final. `output` is the whole, in the last piece alone."""

    text: str
    token_ids: list[int]
    output: RequestOutput | None
