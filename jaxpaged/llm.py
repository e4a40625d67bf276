"""`LLM`: load a model, generate from prompts."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import checkpoints
from jaxpaged.completion_text import CompletionText
from jaxpaged.engine.config import DType, Policy
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.memory import give_back_unused
from jaxpaged.engine.requests import Request, Update
from jaxpaged.engine.sizes import best_dtype, engine_config
from jaxpaged.models import abstract_model
from jaxpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamedOutput
from jaxpaged.sampling_params import SamplingParams, is_int
from jaxpaged.tokenizer import load_tokenizer
from jaxpaged.trace import Event, open_sink
from kernels_pallas.paged_attention import check_kv_pool, check_platform

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

# While somebody reads along, a run is short; its dispatch costs the device nothing, since the next one is always ahead.
_STREAMED_STEPS = 2
_REFRESH_SECONDS = 0.1  # of the progress bar


class LLM:
    """A model and the engine that serves it.

    model: a folder in Hugging Face layout, a .gguf file, or the name of the packaged model.
    dtype: of weights and block pool; "auto" is bfloat16, but float32 on a CPU that has no products of bfloat16 or where
    `max_num_seqs` is 1. Logits and softmax are float32 always.
    block_size, num_blocks: the pool, in tokens and blocks; `num_blocks=None` takes what memory allows.
    max_num_seqs: sequences that run at once. max_num_waiting: queue places on the device; any number may wait on the
    host.
    max_num_batched_tokens: the token budget of one step. max_model_len: None takes the model's own.
    schedule: "mixed" or "prefill_first" (docs/scheduler.md).
    enable_prefix_caching: whether prompts that begin alike are computed once, and share their blocks.
    max_steps: the most steps the device makes before the host looks.
    attention_implementation: one of `kernels_pallas.paged_attention`; None takes the kernel of the platform, and
    "reference" takes any shape anywhere.
    seed: where requests without a seed of their own get theirs from.
    trace: the scheduler trace: True shows it on standard error, a path writes it there (as JSON lines if it ends in
    .jsonl), a function is called with each event (`jaxpaged.trace.Event`).

    Raises FileNotFoundError or ValueError, naming file, tensor or field, for what cannot be loaded or cannot work, and
    NotImplementedError, naming the shape and what is taken, for a pool that the attention kernel does not take.
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
        enable_prefix_caching: bool = True,
        max_steps: int = 16,
        attention_implementation: str | None = None,
        seed: int = 0,
        trace: bool | str | Path | Callable[[Event], None] = False,
    ) -> None:
        real_dtype = _resolve_dtype(dtype, max_num_seqs)
        if not is_int(seed) or seed < 0:
            raise ValueError(f"seed must be an integer of at least 0, not {seed!r}")
        if not isinstance(model, str | Path) or not str(model):
            raise ValueError(f"model must be a path or the name of a packaged model, not {model!r}")
        self._trace = open_sink(trace)
        checkpoint = checkpoints.open_checkpoint(checkpoints.resolve(model))
        model_config = checkpoint.config
        config = engine_config(
            model_config,
            kv_dtype=real_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            schedule=schedule,
            max_steps=max_steps,
            enable_prefix_caching=enable_prefix_caching,
        )
        _, implementation = check_kv_pool(
            config.num_blocks,
            config.block_size,
            model_config.num_kv_heads,
            model_config.head_dim,
            real_dtype,
            attention_implementation,
        )
        check_platform(implementation)
        # What can be refused is refused before the long work.
        self._tokenizer = load_tokenizer(checkpoint.gguf or checkpoint.path)
        placement = checkpoint.plan(real_dtype)
        self.engine = Engine(
            abstract_model(model_config, real_dtype),
            model_config,
            config,
            kv_dtype=real_dtype,
            attention_implementation=attention_implementation,
            seed=seed,
            trace=self._trace,
        )
        rows = ", ".join(str(bucket.rows) for bucket in config.buckets)
        # XLA works outside of Python's lock: the weights come in while it compiles.
        with _clock(f"compiling buckets of {rows} rows") as clock, ThreadPoolExecutor(1) as worker:
            compiling = worker.submit(self.engine.warm_up, self.engine.lower())
            self.engine.update_weights(nnx.state(placement.load()))
            while not wait([compiling], timeout=1).done:
                clock.refresh()
            compiling.result()
        give_back_unused()

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
        """Complete each prompt: text, token ids, or `{"prompt": ...}` / `{"prompt_token_ids": ...}`. In their order.

        A dict may have a `"cache_salt"`, a text: the prompt then shares the prefix cache with those of the same alone.

        sampling_params: one for all, or one for each; None is `SamplingParams()`. All requests are checked before any
        work: raises ValueError, naming the prompt and the field, and none of them is run.
        """
        each = _as_list(prompts)
        params = _params_for_each(sampling_params, len(each))
        salts = [_cache_salt(prompt) for prompt in each]
        texts, all_token_ids = [], []
        for index, (prompt, own, salt) in enumerate(zip(each, params, salts, strict=True)):
            try:
                text, token_ids = self._encode(prompt)
                self.engine.check_request(token_ids, self._for_engine(own), salt)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}" if len(each) > 1 else str(error)) from error
            texts.append(text)
            all_token_ids.append(token_ids)
        completions = self._complete(all_token_ids, params, salts, use_tqdm)
        return [self._output(*completion, text) for completion, text in zip(completions, texts, strict=True)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        Raises ValueError, before any work, if the model has no chat template or messages are not of this form.
        """
        many = _is_list(messages) and not (messages and isinstance(messages[0], Mapping))
        conversations = cast(Sequence[Messages], messages if many else [messages])
        return self.generate([self.chat_prompt(each) for each in conversations], sampling_params, use_tqdm)

    def chat_prompt(self, messages: Messages) -> dict[str, Any]:
        """A conversation as the prompt that asks for the next answer: its text and token ids."""
        tokenizer = self.get_tokenizer()
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: use generate()")
        _check_messages(messages)
        try:
            dicts = [dict(message) for message in messages]
            text = str(tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from error
        # The template writes the special tokens itself.
        return {"prompt": text, "prompt_token_ids": self._tokenize(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamedOutput]:
        """Complete one prompt, piece by piece. The texts of the pieces together are the text that `generate` returns.

        One call at a time: until its last piece is read, or the stream is closed, others raise RuntimeError. Raises
        ValueError as `generate` does, at the first piece.
        """
        (params,) = _params_for_each(sampling_params, 1)
        text, token_ids = self._encode(prompt)
        self.engine.check_request(token_ids, self._for_engine(params), _cache_salt(prompt))
        self._require_idle()
        completion = CompletionText(self._tokenizer, params) if self._tokenizer else None
        steps = min(_STREAMED_STEPS, self.engine.config.max_steps)
        try:
            request = self.engine.add_request(token_ids, self._for_engine(params), _cache_salt(prompt))
            while request.finish_reason is None:
                for update in self.engine.run(steps):
                    num_tokens = len(request.token_ids) - len(update.token_ids)
                    piece = self._take_in(update, request, completion)
                    final = self._output(request, completion, text) if request.finish_reason else None
                    yield StreamedOutput(piece, request.token_ids[num_tokens:], final)
        finally:
            # A stream that Python's own end closes has nothing to clean up for.
            if not sys.is_finalizing():
                if self.engine.has_unfinished_requests():
                    self.engine.abort_all()
                self._flush_trace()

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes: what is asked from now on is computed anew."""
        self.engine.reset_prefix_cache()

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """A prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
                keys = sorted(map(str, prompt))
                raise ValueError(
                    f"a prompt has the keys 'prompt' or 'prompt_token_ids', and may have 'cache_salt', not {keys}"
                )
            text = prompt.get("prompt", "")
            if not isinstance(text, str):
                raise ValueError(f"prompt must be text, not {type(text).__name__}")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), prompt["prompt_token_ids"]
            prompt = text
        if not isinstance(prompt, str):
            return None, prompt
        token_ids = self._tokenize(prompt, add_special_tokens=True)
        if not token_ids:
            raise ValueError("prompt is empty, and the model's tokenizer adds no BOS token")
        return prompt, token_ids

    def _tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"prompt is not valid Unicode text: {text!r:.80} has lone surrogates") from None
        return self.get_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def _require_idle(self) -> None:
        if self.engine.has_unfinished_requests():
            raise RuntimeError("the engine is at work: read the open stream to its end, or close() it, first")

    def _for_engine(self, params: SamplingParams) -> SamplingParams:
        """Without what is done here, where there is text. Raises ValueError if there is none."""
        if not params.stop:
            return params
        if self._tokenizer is None:
            raise ValueError("stop needs a tokenizer, and this model has none: use stop_token_ids")
        return replace(params, stop=None)

    def _take_in(self, update: Update, request: Request, completion: CompletionText | None) -> str:
        """The new text of an update. At a stop string the request ends, and what came after it is cut off."""
        if completion is None:
            return ""
        piece = completion.add(update.token_ids, is_last=update.finish_reason is not None)
        if completion.stopped_after is not None:
            self.engine.abort(request.seq)
            del request.token_ids[completion.stopped_after :]
            request.finish_reason, request.finish_time = "stop", time.perf_counter()
        return piece

    def _complete(
        self,
        all_token_ids: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        salts: Sequence[str | None],
        use_tqdm: bool,
    ) -> list[tuple[Request, CompletionText | None]]:
        """Run checked requests to their end. The text is followed on the way only where it can end a request."""
        self._require_idle()
        num_tokens = 0
        try:
            requests = [
                self.engine.add_request(ids, self._for_engine(own), salt)
                for ids, own, salt in zip(all_token_ids, params, salts, strict=True)
            ]
            completions = {
                request.seq: (request, CompletionText(self.get_tokenizer(), own) if own.stop else None)
                for request, own in zip(requests, params, strict=True)
            }
            hidden = not (use_tqdm and requests)
            with tqdm(total=len(requests), desc="generate", unit=" requests", disable=hidden) as bar:
                start = due = time.perf_counter()
                steps = 1  # short runs first, so that the first tokens are seen, and timed, when they come
                while self.engine.has_unfinished_requests():
                    steps = min(steps, self.engine.config.max_steps)
                    for update in self.engine.run(steps):
                        num_tokens += len(update.token_ids)
                        request, completion = completions[update.seq]
                        self._take_in(update, request, completion)
                        bar.update(request.finish_reason is not None)
                    steps *= 2
                    now = time.perf_counter()
                    bar.set_postfix_str(f"{num_tokens / (now - start):.0f} output tokens/s", refresh=now >= due)
                    due = now + _REFRESH_SECONDS if now >= due else due
            return list(completions.values())
        finally:
            if self.engine.has_unfinished_requests():
                self.engine.abort_all()  # an interrupted call leaves nothing for the next one
            self._flush_trace()

    def _flush_trace(self) -> None:
        if self._trace:
            self._trace.flush()

    def _output(self, request: Request, completion: CompletionText | None, text: str | None) -> RequestOutput:
        reason, first_token_time, finish_time = request.finish_reason, request.first_token_time, request.finish_time
        assert reason and first_token_time and finish_time, "only a finished request has an output"
        if completion:
            decoded = completion.text
        else:
            decoded = (
                str(self._tokenizer.decode(request.token_ids, skip_special_tokens=True)) if self._tokenizer else ""
            )
        return RequestOutput(
            request_id=str(request.seq),
            prompt=text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput(0, decoded, request.token_ids, reason)],
            metrics=RequestMetrics(request.arrival_time, first_token_time, finish_time),
            num_cached_tokens=request.num_cached_tokens or 0,
        )


def _clock(what: str) -> tqdm:
    """For a wait whose share done is not known. Only a terminal shows it."""
    return tqdm(desc=what, bar_format="{desc} ... {elapsed}", disable=None, leave=False)


def _resolve_dtype(dtype: DType, max_num_seqs: int) -> jnp.dtype:
    if dtype not in get_args(DType):
        raise ValueError(f"dtype must be one of {list(get_args(DType))}, not {dtype!r}")
    return best_dtype(max_num_seqs) if dtype == "auto" else jnp.dtype(dtype)


def _cache_salt(prompt: Prompt) -> str | None:
    return prompt.get("cache_salt") if isinstance(prompt, Mapping) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: text, a dict and token ids are one; any other list, and an array of two axes, hold many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "__array__"):
        many = np.ndim(prompts) == 2
    elif _is_list(prompts):
        many = all(isinstance(first, Sequence | Mapping) or np.ndim(first) for first in prompts[:1])
    else:
        raise ValueError(f"prompts must be text, token ids, or a list of them, not {type(prompts).__name__}")
    return list(cast(Sequence[Prompt], prompts)) if many else [cast(Prompt, prompts)]


def _params_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _is_list(params):
        raise ValueError(f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}")
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise ValueError(f"sampling_params[{index}] must be SamplingParams, not {type(one).__name__}")
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} given for {count} prompts")
    return list(params)


def _check_messages(messages: Messages) -> None:
    if not _is_list(messages) or not messages:
        raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, not {messages!r:.80}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] must be {{'role': ..., 'content': ...}}, not {message!r:.80}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"messages[{index}]: {key!r} must be text, not {message.get(key)!r:.80}")
