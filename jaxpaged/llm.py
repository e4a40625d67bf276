"""`LLM`: load a model, generate from prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import checkpoints
from jaxpaged.engine.config import Policy
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.requests import Request
from jaxpaged.engine.sizes import engine_config
from jaxpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamedOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.tokenizer import Detokenizer, load_tokenizer
from jaxpaged.trace import Event, open_sink

DType = Literal["auto", "float32", "bfloat16"]
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

# While somebody reads along, a run is short; its dispatch costs the device nothing, since the next one is always ahead.
_STREAMED_STEPS = 2


class LLM:
    """A model and the engine that serves it.

    model: a folder in Hugging Face layout, a .gguf file, or the name of the packaged model.
    dtype: of weights and block pool; "auto" is float32 on CPU and bfloat16 elsewhere. Logits are float32 always.
    block_size, num_blocks: the pool, in tokens and blocks; `num_blocks=None` takes what memory allows.
    max_num_seqs: sequences that run at once. max_num_waiting: queue places on the device; any number may wait on the host.
    max_num_batched_tokens: the token budget of one step. max_model_len: None takes the model's own.
    schedule: "mixed" or "prefill_first" (docs/scheduler.md).
    max_steps: the most steps the device makes before the host looks.
    seed: where requests without a seed of their own get theirs from.
    trace: the scheduler trace: True shows it on standard error, a path writes it there (as JSON lines if it ends in
    .jsonl), a function is called with each event (`jaxpaged.trace.Event`).

    Raises FileNotFoundError or ValueError, naming file, tensor or field, for what cannot be loaded or cannot work.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: DType = "auto",
        block_size: int = 256,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_waiting: int = 256,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        schedule: Policy = "mixed",
        max_steps: int = 16,
        seed: int = 0,
        trace: bool | str | Path | Callable[[Event], None] = False,
    ) -> None:
        path = checkpoints.resolve(model)
        real_dtype = _resolve_dtype(dtype)
        config = engine_config(
            checkpoints.read_config(path),
            kv_dtype=real_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            schedule=schedule,
            max_steps=max_steps,
        )
        self._tokenizer = load_tokenizer(path)
        model_config, module = checkpoints.load(path, real_dtype)
        self._trace = open_sink(trace)
        self.engine = Engine(module, model_config, config, kv_dtype=real_dtype, seed=seed, trace=self._trace)
        self.engine.warm_up()

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts can be text; without a tokenizer they are token ids."""
        return self._tokenizer is not None

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer. Raises ValueError if it has none."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: give prompts as token ids")
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt: text, token ids, or `{"prompt": ...}` / `{"prompt_token_ids": ...}`. In the given order.

        sampling_params: one for all, or one for each; None is `SamplingParams()`. All requests are checked before any
        work: raises ValueError, naming the field, and none of them is run.
        """
        texts, all_token_ids = zip(*map(self._encode, _as_list(prompts)), strict=True) if _as_list(prompts) else ((), ())
        params = _params_for_each(sampling_params, len(all_token_ids))
        for token_ids, own in zip(all_token_ids, params, strict=True):
            self.engine.check_request(token_ids, own)
        requests = [self.engine.add_request(ids, own) for ids, own in zip(all_token_ids, params, strict=True)]
        self._complete(requests, use_tqdm)
        return [self._output(request, text) for request, text in zip(requests, texts, strict=True)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        Raises ValueError if the model has no chat template.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(each) for each in conversations], sampling_params, use_tqdm)

    def chat_prompt(self, messages: Messages) -> dict[str, Any]:
        """A conversation as the prompt that asks for the next answer: its text and token ids."""
        tokenizer = self.get_tokenizer()
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: use generate()")
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamedOutput]:
        """Complete one prompt, piece by piece. The texts of the pieces together are the text that `generate` returns.

        Raises ValueError as `generate` does, at the first piece.
        """
        text, token_ids = self._encode(prompt)
        (params,) = _params_for_each(sampling_params, 1)
        request = self.engine.add_request(token_ids, params)
        detokenizer = Detokenizer(self._tokenizer) if self._tokenizer else None
        steps = min(_STREAMED_STEPS, self.engine.config.max_steps)
        try:
            while request.finish_reason is None:
                for update in self.engine.run(steps):
                    piece = detokenizer.add(update.token_ids) if detokenizer else ""
                    if detokenizer and update.finish_reason:
                        piece += detokenizer.finish()
                    final = self._output(request, text) if update.finish_reason else None
                    yield StreamedOutput(piece, update.token_ids, final)
        finally:
            if request.finish_reason is None:
                self.engine.abort_all()
            self._flush_trace()

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """A prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise ValueError(f"a prompt has the keys 'prompt' and 'prompt_token_ids', not {sorted(map(str, prompt))}")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), prompt["prompt_token_ids"]
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            token_ids = self.get_tokenizer()(prompt).input_ids
            if not token_ids:
                raise ValueError("prompt is empty, and the model's tokenizer adds no BOS token")
            return prompt, token_ids
        return None, prompt

    def _complete(self, requests: list[Request], use_tqdm: bool) -> None:
        num_tokens = 0
        try:
            with tqdm(total=len(requests), desc="generate", unit=" requests", disable=not use_tqdm) as bar:
                steps = 1  # short runs first, so that the first tokens are seen, and timed, when they come
                while self.engine.has_unfinished_requests():
                    steps = min(steps, self.engine.config.max_steps)
                    for update in self.engine.run(steps):
                        num_tokens += len(update.token_ids)
                        bar.update(update.finish_reason is not None)
                    steps *= 2
                    bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} output tokens/s")
        except BaseException:
            self.engine.abort_all()  # an interrupted call leaves nothing for the next one
            raise
        finally:
            self._flush_trace()

    def _flush_trace(self) -> None:
        if self._trace:
            self._trace.flush()

    def _output(self, request: Request, text: str | None) -> RequestOutput:
        decoded = self._tokenizer.decode(request.token_ids, skip_special_tokens=True) if self._tokenizer else ""
        return RequestOutput(
            request_id=str(request.seq),
            prompt=text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput(0, decoded, request.token_ids, request.finish_reason)],
            metrics=RequestMetrics(request.arrival_time, request.first_token_time, request.finish_time),
        )


def _resolve_dtype(dtype: DType) -> jnp.dtype:
    if dtype not in get_args(DType):
        raise ValueError(f"dtype must be one of {list(get_args(DType))}, not {dtype!r}")
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(dtype)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: text, a dict and a list of ids are one; any other list holds many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "__array__"):
        raise ValueError(f"prompts must be text, token ids, or a list of them, not {type(prompts).__name__}")
    prompts = list(prompts)
    return prompts if not prompts or isinstance(prompts[0], str | Sequence | Mapping) or hasattr(prompts[0], "__len__") else [prompts]


def _params_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    each = [params or SamplingParams()] * count if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise ValueError(f"sampling_params: {len(each)} given for {count} prompts")
    for one in each:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(one).__name__}")
    return each
