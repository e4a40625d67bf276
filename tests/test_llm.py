"""`LLM`: forms of prompts and parameters, seeds, streams, chats, interruptions, traces. One tiny model serves all."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxpaged.llm import LLM
from jaxpaged.outputs import StreamedOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.trace import Added, Cancelled, Event, Finished, Scheduled, check_events, open_sink, parse_text, read_jsonl
from tests.tiny_llm import EOS, SIZES, recorder, tiny_folder, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["Hello", "a", "Why is the sky blue?", "b c", "zz\n\U0001f600", "What is 7 times 8?", "?", "12345"]


@pytest.fixture
def llm() -> Iterator[LLM]:
    """The shared LLM. Whatever a test did to it, no request and no block is left."""
    llm = tiny_llm()
    yield llm
    assert not llm.engine.has_unfinished_requests()
    pool = llm.engine._state.block_pool
    assert int(pool.num_free) == SIZES["num_blocks"] and sorted(pool.free.tolist()) == list(range(SIZES["num_blocks"]))


def run(llm: LLM, prompts, params=GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def check_trace(events: list[Event]) -> None:
    """It is sound, and what was added in it ended in it."""
    limits = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    assert check_events(events, **{name: SIZES[name] for name in limits}) == []
    ended = sorted(event.seq for event in events if isinstance(event, Finished | Cancelled))
    assert ended == [event.seq for event in events if isinstance(event, Added)]


def tokens_of(pieces: list[StreamedOutput]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def ids(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer().encode(text)


def test_forms_of_prompts(llm) -> None:
    """One or many, text or ids, lists or arrays or dicts: the same prompts, the same tokens, in the same order."""
    tokens = [ids(llm, text) for text in PROMPTS]
    alone = [run(llm, text) for text in PROMPTS]
    assert all(len(outputs) == 1 for outputs in alone) and len({tuple(out) for (out,) in alone}) == len(PROMPTS)
    expected = [out for (out,) in alone]
    for one in (tokens[2], tuple(tokens[2]), np.array(tokens[2]), np.array(tokens[2], np.uint8), jnp.array(tokens[2])):
        assert run(llm, one) == [expected[2]]
    for one in (
        {"prompt": PROMPTS[2]},
        {"prompt_token_ids": tokens[2]},
        {"prompt": "x", "prompt_token_ids": tokens[2]},
    ):
        assert run(llm, one) == [expected[2]]
    mixed = [PROMPTS[0], tokens[1], {"prompt": PROMPTS[2]}, np.array(tokens[3]), {"prompt_token_ids": tokens[4]}]
    for many in (PROMPTS, tuple(PROMPTS), tokens, [np.array(t) for t in tokens], [jnp.array(t) for t in tokens], mixed):
        assert run(llm, many) == expected[: len(many)]
    assert run(llm, np.array([tokens[2][:3], tokens[5][:3]])) == run(llm, [tokens[2][:3], tokens[5][:3]])
    assert run(llm, []) == [] == run(llm, [], [])


def test_the_fields_of_an_output(llm) -> None:
    texts = llm.generate(["Hello", "a"], GREEDY, use_tqdm=False)
    (from_ids,) = llm.generate([ids(llm, "a")], GREEDY, use_tqdm=False)
    assert [output.prompt for output in texts] == ["Hello", "a"] and from_ids.prompt is None
    assert int(from_ids.request_id) == int(texts[1].request_id) + 1 == int(texts[0].request_id) + 2
    for output in (*texts, from_ids):
        (completion,) = output.outputs
        assert output.finished and completion.index == 0 and completion.finish_reason == "length"
        assert all(type(token) is int for token in output.prompt_token_ids + completion.token_ids)
        assert len(completion.token_ids) == GREEDY.max_tokens
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
        metrics = output.metrics
        assert 0 < metrics.arrival_time < metrics.first_token_time <= metrics.finished_time
    assert texts[0].prompt_token_ids == ids(llm, "Hello")


def test_a_stop_token_ends_a_request_and_is_not_shown(llm) -> None:
    params = [SamplingParams(temperature=2.0, max_tokens=50, seed=seed) for seed in range(24)]
    stopped = [
        o.outputs[0] for o in llm.generate(["Hello"] * 24, params, False) if o.outputs[0].finish_reason == "stop"
    ]
    assert stopped and any(len(completion.token_ids) < 40 for completion in stopped)
    for completion in stopped:
        assert completion.token_ids[-1] in EOS and not set(completion.token_ids[:-1]) & set(EOS)
        assert "</s>" not in completion.text and "<|end|>" not in completion.text
    assert run(llm, "Hello", SamplingParams(temperature=2.0, max_tokens=50, seed=0, ignore_eos=True))[0][49:]


def test_parameters_one_for_all_or_one_for_each(llm) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 12, 1)]
    outputs = run(llm, PROMPTS[:3], each)
    assert outputs == [out[:n] for out, n in zip(run(llm, PROMPTS[:3]), (3, 12, 1), strict=True)]
    assert run(llm, PROMPTS[:3], tuple(each)) == outputs
    assert len(run(llm, "Hello", None)[0]) <= SamplingParams().max_tokens
    for count in (0, 1, 2, 4):
        with pytest.raises(ValueError, match=f"^sampling_params: {count} given for 3 prompts$"):
            run(llm, PROMPTS[:3], (each + each)[:count])
    for bad, says in [
        (5, " must be SamplingParams or a list of them, not int"),
        ({"temperature": 0}, " must be SamplingParams or a list of them, not dict"),
        ([each[0], None, each[1]], r"\[1\] must be SamplingParams, not NoneType"),
    ]:
        with pytest.raises(ValueError, match=f"^sampling_params{says}$"):
            run(llm, PROMPTS[:3], bad)


def test_unknown_keywords_are_errors(llm) -> None:
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        LLM(tiny_folder(), gpu_memory_utilization=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"positional"):
        LLM(tiny_folder(), "float32")  # type: ignore[misc]
    for call in (llm.generate, llm.chat, llm.stream):
        with pytest.raises(TypeError, match="max_tokens"):
            call("a", max_tokens=3)
    assert "kwargs" not in inspect.signature(LLM).parameters


def test_seeds(llm) -> None:
    """The same seed draws the same tokens, alone and in a batch; other seeds, and no seeds, draw others."""

    def hot(seed: int | None) -> SamplingParams:
        return SamplingParams(temperature=1.5, max_tokens=12, seed=seed, ignore_eos=True)

    alone = run(llm, "Hello", hot(7))[0]
    assert run(llm, "Hello", hot(7))[0] == alone
    batch = run(
        llm, ["a", "Hello", "Hello", "?", "Hello", "Hello"], [hot(1), hot(7), hot(8), GREEDY, hot(7), hot(None)]
    )
    assert batch[1] == batch[4] == alone and batch[2] != alone and batch[5] != alone
    assert batch[3] == run(llm, "?")[0]
    assert len({tuple(out) for out in run(llm, ["Hello"] * 8, [hot(seed) for seed in range(8)])}) == 8
    assert len({tuple(out) for out in run(llm, ["Hello"] * 8, hot(None))}) == 8


def test_the_pieces_of_a_stream_are_what_generate_returns(llm) -> None:
    for prompt in PROMPTS:
        for params in (GREEDY, SamplingParams(temperature=1.0, max_tokens=50, seed=len(prompt))):
            pieces = list(llm.stream(prompt, params))
            (whole,) = llm.generate(prompt, params, use_tqdm=False)
            assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
            assert tokens_of(pieces) == whole.outputs[0].token_ids
            assert [piece.output for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1].output and pieces[-1].output.outputs == whole.outputs
            assert pieces[-1].output.prompt == prompt
    assert len(list(llm.stream("Hello", GREEDY))) >= GREEDY.max_tokens // 2  # not all at the end


def test_a_stream_that_ends_inside_a_character(llm) -> None:
    """What the detokenizer holds back comes with the last piece."""
    first_byte = ids(llm, "\U0001f600")[0]
    hot = [SamplingParams(temperature=2.0, max_tokens=50, seed=seed, ignore_eos=True) for seed in range(8)]
    seed, output = next((s, out) for s, out in enumerate(run(llm, ["Hello"] * 8, hot)) if first_byte in out)
    cut = SamplingParams(temperature=2.0, max_tokens=output.index(first_byte) + 1, seed=seed, ignore_eos=True)
    (whole,) = llm.generate("Hello", cut, use_tqdm=False)
    text = "".join(piece.text for piece in llm.stream("Hello", cut))
    assert text == whole.outputs[0].text and text.endswith("\ufffd")


def test_stop_strings(llm) -> None:
    """Each three characters of each text as a stop string: generated and streamed alike, neighbours unchanged."""
    plain = {prompt: llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS[:4]}
    for prompt, whole in plain.items():
        for start in range(len(whole.text) - 2):
            stop = whole.text[start : start + 3]
            end = whole.text.index(stop)
            for include in (False, True):
                params = replace(GREEDY, stop=["never", stop], include_stop_str_in_output=include)
                stopped, other = (o.outputs[0] for o in llm.generate([prompt, "b"], [params, GREEDY], use_tqdm=False))
                assert (stopped.text, stopped.finish_reason) == (whole.text[: end + 3 * include], "stop")
                assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
                decode = partial(llm.get_tokenizer().decode, skip_special_tokens=True)
                assert stop in decode(stopped.token_ids) and stop not in decode(stopped.token_ids[:-1])
                pieces = list(llm.stream(prompt, params))
                assert "".join(piece.text for piece in pieces) == stopped.text
                assert pieces[-1].output and pieces[-1].output.outputs == [stopped]
                assert tokens_of(pieces) == stopped.token_ids
        assert other.token_ids == run(llm, "b")[0]


def test_a_stop_string_waits_for_min_tokens(llm) -> None:
    whole = llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0]
    for least in (0, 3, 8):
        params = replace(GREEDY, stop=sorted(set(whole.text)), min_tokens=least)
        (stopped,) = llm.generate("Hello", params, use_tqdm=False)[0].outputs
        assert len(stopped.token_ids) == max(1, least) and stopped.finish_reason == "stop"


def test_stop_strings_need_text(llm, monkeypatch) -> None:
    params = replace(GREEDY, stop="x")
    with pytest.raises(ValueError, match=r"^stop needs text, and the engine has token ids alone"):
        llm.engine.add_request([1, 2], params)
    tokens = ids(llm, "Hello")
    monkeypatch.setattr(llm, "_tokenizer", None)
    for call in (lambda: run(llm, tokens, params), lambda: list(llm.stream(tokens, params))):
        with pytest.raises(ValueError, match=r"^stop needs a tokenizer, and this model has none: use stop_token_ids$"):
            call()


def test_a_model_without_a_tokenizer(llm, monkeypatch) -> None:
    expected = run(llm, PROMPTS)
    tokens = [ids(llm, text) for text in PROMPTS]
    monkeypatch.setattr(llm, "_tokenizer", None)
    assert not llm.has_tokenizer
    outputs = llm.generate(tokens, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert {output.outputs[0].text for output in outputs} == {""}
    pieces = list(llm.stream(tokens[0], GREEDY))
    assert tokens_of(pieces) == expected[0] and not any(piece.text for piece in pieces)
    for call in (lambda: run(llm, "Hello"), lambda: llm.chat([{"role": "user", "content": "x"}]), llm.get_tokenizer):
        with pytest.raises(ValueError, match=r"^this model has no tokenizer: give prompts as token ids$"):
            call()


def test_chat(llm) -> None:
    first = [{"role": "user", "content": "hey"}]
    second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}]
    (one,) = llm.chat(first, GREEDY, use_tqdm=False)
    assert one.prompt == "<|u|>hey</s><|a|>"
    assert one.prompt_token_ids == [3, *ids(llm, "hey"), 2, 4]
    assert one.outputs[0].token_ids == run(llm, [one.prompt_token_ids])[0]
    both = llm.chat([second, first], GREEDY, use_tqdm=False)
    assert [output.prompt for output in both] == ["<|u|>hey</s><|a|>yes</s><|u|>no</s><|a|>", one.prompt]
    assert both[1].outputs == one.outputs
    assert llm.chat([], GREEDY) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_an_interrupted_generate_leaves_a_usable_llm(llm, monkeypatch, error, calls) -> None:
    expected, engine_run = run(llm, PROMPTS), llm.engine.run
    before = len(recorder().events)

    def interrupted(max_steps: int) -> list:
        nonlocal calls
        calls -= 1
        if not calls:
            raise error
        return engine_run(max_steps)

    monkeypatch.setattr(llm.engine, "run", interrupted)
    with pytest.raises(error):
        run(llm, PROMPTS)
    monkeypatch.undo()
    ended = [type(event) for event in recorder().events[before:] if isinstance(event, Cancelled | Finished)]
    assert len(ended) == len(PROMPTS) and Cancelled in ended
    assert run(llm, PROMPTS) == expected
    check_trace(recorder().events[before:])


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_stream_that_is_closed_early_leaves_a_usable_llm(llm, pieces) -> None:
    expected, before = run(llm, PROMPTS), len(recorder().events)
    for _ in range(3):
        stream = llm.stream("Hello", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        for _ in range(pieces):
            next(stream)
        stream.close()
        assert isinstance(recorder().events[-1], Cancelled)
        assert run(llm, PROMPTS) == expected
    check_trace(recorder().events[before:])


def test_calls_do_not_overlap(llm) -> None:
    stream = llm.stream("Hello", GREEDY)
    first = next(stream)
    for call in (lambda: run(llm, "a"), lambda: next(llm.stream("a", GREEDY))):
        with pytest.raises(RuntimeError, match=r"read the open stream to its end, or close\(\) it"):
            call()
    rest = list(stream)
    assert tokens_of([first, *rest]) == run(llm, "Hello")[0]


def test_the_progress_bar_goes_to_standard_error_or_nowhere(llm, capfd) -> None:
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    llm.generate(PROMPTS, GREEDY)
    out, err = capfd.readouterr()
    assert out == "" and "8/8" in err and "output tokens/s" in err


def test_the_trace_of_a_run_is_sound_and_the_same_in_every_form(llm, tmp_path) -> None:
    before = len(recorder().events)
    llm.reset_prefix_cache()
    run(llm, PROMPTS, [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * len(PROMPTS))
    check_trace(recorder().events[before:])
    events = recorder().events[before:]
    assert {type(event).__name__ for event in events} == {
        "Added",
        "Scheduled",
        "Waiting",
        "Preempted",
        "CacheHit",
        "Finished",
    }
    heard: list[Event] = []
    for form in (tmp_path / "trace.txt", str(tmp_path / "trace.jsonl"), heard.append):
        sink = open_sink(form)
        assert sink is not None
        for event in events:
            sink(event)
        sink.flush()
    assert heard == events
    text = (tmp_path / "trace.txt").read_text()
    part = open_sink(tmp_path / "part.txt")
    cut = next(i for i, event in enumerate(events) if isinstance(event, Scheduled) and event.phase == "DECODE") + 1
    for event in events[:cut]:
        part(event)
    part.flush()  # a part that is still open is written, too
    *lines, header, last = (tmp_path / "part.txt").read_text().splitlines()
    assert text.splitlines()[: len(lines)] == lines and last in text and header.endswith("seqs=1 tokens=1")
    assert list(read_jsonl((tmp_path / "trace.jsonl").read_text().splitlines())) == events
    from_text = list(parse_text((tmp_path / "trace.txt").read_text().splitlines()))
    unknown = [
        msgspec.structs.replace(event, time_us=0, **({"finish_reason": None} if isinstance(event, Finished) else {}))
        for event in events
    ]
    offset = {event.step - text.step for event, text in zip(unknown, from_text, strict=True)}
    assert offset == {0}
    assert from_text == unknown


@pytest.mark.parametrize("when", ["after the device's call", "while requests are added"])
def test_an_interrupt_anywhere(llm, monkeypatch, when) -> None:
    """A signal is seen when a call returns: the old state is donated then, and the new one not yet kept."""
    expected, calls = run(llm, PROMPTS), 0
    name = "_run" if when.endswith("call") else "add_request"
    original = getattr(llm.engine, name)

    def interrupted(*args):
        nonlocal calls
        calls += 1
        result = original(*args)
        if calls == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(llm.engine, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS)
    monkeypatch.undo()
    assert run(llm, PROMPTS) == expected


def test_a_trace_function_that_fails(llm) -> None:
    """Its exception comes out of `generate`, once, and the next call is served."""
    expected = run(llm, PROMPTS)
    recorder().fail_after = len(recorder().events) + 20
    with pytest.raises(RuntimeError, match="the trace function failed"):
        run(llm, PROMPTS)
    assert run(llm, PROMPTS) == expected


def test_prompts_that_begin_alike_are_computed_once(llm) -> None:
    """Also by name of the salt; and an output says how much of its prompt came from the prefix cache."""
    llm.reset_prefix_cache()
    prompt = [5, 6, 7] * 12
    size = llm.engine.config.block_size
    most = (len(prompt) - 1) // size * size

    def cached(cache_salt: str | None = None) -> int:
        asked = {"prompt_token_ids": prompt} | ({"cache_salt": cache_salt} if cache_salt else {})
        (output,) = llm.generate(asked, GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    assert [cached(), cached(), cached("tenant"), cached("tenant"), cached()] == [0, most, 0, most, most]
    assert most > 0
    llm.reset_prefix_cache()
    assert cached() == 0
