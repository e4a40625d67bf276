"""`python -m jaxpaged.generate`: complete prompts from the command line."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax

from jaxpaged.compilation_cache import use_compilation_cache
from jaxpaged.engine.config import DType, Policy
from jaxpaged.engine.stats import phase_times
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpaged.llm import LLM, Prompt

DEFAULT_MODEL = "smollm2-135m-instruct"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpaged.generate",
        description="Complete prompts with the paged engine. Text goes to standard output, all else to standard error.",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; else one a line from standard input")
    parser.add_argument("--file", type=Path, metavar="FILE", help="read prompts from FILE, one a line")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a folder, .gguf file or packaged model (%(default)s)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="ask as a user in a chat; default if the model has a template"
    )
    form.add_argument("--raw", action="store_true", help="give the prompt to the model as it is")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=64, metavar="N", help="most output tokens (%(default)s)")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest (%(default)s)"
    )
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: from all")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest with this share (%(default)s)"
    )
    sampling.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="and this share of the likeliest at least (%(default)s)"
    )
    sampling.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: repeat less (%(default)s)"
    )
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="for a temperature above 0 (%(default)s)")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="end where this text would come; can be given several times"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--dtype", choices=get_args(DType), default="auto", help="of weights and blocks (%(default)s)")
    engine.add_argument("--block-size", type=int, default=256, metavar="N", help="tokens of a KV block (%(default)s)")
    engine.add_argument("--num-blocks", type=int, metavar="N", help="KV blocks (what memory allows)")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences run at once (all prompts, up to 64)")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=512, metavar="N", help="token budget of a step (%(default)s)"
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence in tokens (the model's own)")
    engine.add_argument(
        "--attention-implementation",
        metavar="NAME",
        help="tpu, gpu or reference, which takes any shape (the platform's own)",
    )
    engine.add_argument("--schedule", choices=get_args(Policy), default="mixed", help="policy of a step (%(default)s)")
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute prompts that begin alike once (on)",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--trace",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE",
        help="show the scheduler trace, or write it to FILE (JSON lines if it ends in .jsonl); prompts go before it or "
        "after --",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object with everything")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader is gone. What is still buffered goes nowhere, and must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, NotImplementedError, OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        stop=args.stop,
    )
    texts = _read_prompts(args)
    start = time.perf_counter()
    _note(f"loading and compiling {args.model} ...")
    use_compilation_cache()
    # Only here, since it takes seconds; and transformers says at import that torch is missing, which nobody needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from jaxpaged.llm import LLM

    with _no_garbage_collection():
        llm = LLM(
            args.model,
            dtype=args.dtype,
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            # Fewer slots are fewer shapes to compile.
            max_num_seqs=min(64, len(texts)) if args.max_num_seqs is None else args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            attention_implementation=args.attention_implementation,
            schedule=args.schedule,
            enable_prefix_caching=args.enable_prefix_caching,
            seed=args.seed,
            trace=args.trace,
        )
    _note(f"ready after {time.perf_counter() - start:.1f} s")
    prompts = [_to_prompt(llm, text, args) for text in texts]
    shows_trace = args.trace is True
    if len(prompts) == 1 and not args.json and not shows_trace:
        outputs = [_stream(llm, prompts[0], params)]
    else:
        outputs = llm.generate(prompts, params, use_tqdm=not shows_trace)
        print(_as_json(llm, texts, outputs) if args.json else "\n".join(_as_text(llm, texts, outputs)), flush=True)
    _note(_summary(llm, outputs))
    return 0


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """For a start: nothing that it makes is garbage, and looking for some takes half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if _looks_like_a_prompt(args.trace):
        raise ValueError("--trace took a prompt for its FILE: put -- before the prompts")
    if args.prompts and args.file:
        raise ValueError("give prompts as arguments or with --file, not both")
    if args.prompts:
        return args.prompts
    if not args.file and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
    source = args.file or "standard input"
    try:
        text = args.file.read_text(encoding="utf-8-sig") if args.file else sys.stdin.read()
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 text: {error}") from error
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ValueError(f"no prompt in {source}: it has no line with text")
    return prompts


def _looks_like_a_prompt(trace: bool | str) -> bool:
    """A FILE's name may hold spaces, but hardly without a suffix."""
    return isinstance(trace, str) and " " in trace.strip() and not Path(trace).suffix[1:].isalnum()


def _to_prompt(llm: LLM, text: str, args: argparse.Namespace) -> Prompt:
    """The prompt in the form that this model takes: a chat, text, or, without a tokenizer, token ids."""
    if not llm.has_tokenizer:
        if args.chat:
            raise ValueError("--chat needs a chat template, and this model has no tokenizer")
        try:
            return [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"this model has no tokenizer: give token ids, like '1 2 3', not {text!r:.80}") from None
    has_template = llm.get_tokenizer().chat_template is not None
    if args.chat and not has_template:
        raise ValueError("--chat needs a chat template, and this model has none: use --raw")
    if has_template and not args.raw:
        return llm.chat_prompt([{"role": "user", "content": text}])
    return text


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Print the completion as it comes."""
    for piece in llm.stream(prompt, params):
        print(piece.text if llm.has_tokenizer else _ids(piece.token_ids), end="", flush=True)
        if piece.output:
            print()
            return piece.output
    raise AssertionError("a stream ends with its whole output")


def _as_text(llm: LLM, texts: Iterable[str], outputs: Iterable[RequestOutput]) -> Iterator[str]:
    for number, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        completion = output.outputs[0]
        yield f"[{number}] {text}\n{completion.text if llm.has_tokenizer else _ids(completion.token_ids)}\n"


def _ids(token_ids: Iterable[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


def _as_json(llm: LLM, texts: Iterable[str], outputs: Iterable[RequestOutput]) -> str:
    entries = [
        {
            "request_id": output.request_id,
            "prompt": text,
            "prompt_token_ids": output.prompt_token_ids,
            "text": output.outputs[0].text,
            "token_ids": output.outputs[0].token_ids,
            "finish_reason": output.outputs[0].finish_reason,
            "num_cached_tokens": output.num_cached_tokens,
        }
        for text, output in zip(texts, outputs, strict=True)
    ]
    return json.dumps({"outputs": entries, "stats": _stats(llm, outputs)}, ensure_ascii=False, indent=2)


def _stats(llm: LLM, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    times = phase_times(llm.engine.run_stats)
    outputs = list(outputs)
    started = min(output.metrics.arrival_time for output in outputs)
    return {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "prefill_seconds": times.prefill_seconds,
        "prefill_tokens_per_second": _rate(times.prefill_tokens, times.prefill_seconds),
        "decode_seconds": times.decode_seconds,
        "decode_tokens_per_second": _rate(times.decode_tokens, times.decode_seconds),
        "seconds_to_first_token": min(output.metrics.first_token_time for output in outputs) - started,
    }


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _summary(llm: LLM, outputs: Iterable[RequestOutput]) -> str:
    stats = _stats(llm, outputs)
    return (
        f"{stats['prompt_tokens']} prompt tokens ({stats['prefill_tokens_per_second']:.1f} tokens/s prefill), "
        f"{stats['output_tokens']} output tokens ({stats['decode_tokens_per_second']:.1f} tokens/s decode), "
        f"first token after {stats['seconds_to_first_token']:.2f} s"
    )


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
