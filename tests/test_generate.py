"""`python -m jaxpaged.generate`: prompts in, text, JSON and traces out, and one line for what goes wrong.

`main` is called with the engine that all tests share; tests/test_program.py starts the program.
"""

import io
import json
import re
import sys

import pytest

from jaxpaged import generate
from jaxpaged.llm import LLM
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.trace import Finished, check_events, open_sink, parse_text, read_jsonl
from tests.tiny_llm import SIZES, tiny_folder, tiny_llm

SUMMARY = re.compile(
    r"(\d+) prompt tokens \((\d+\.\d) tokens/s prefill\), (\d+) output tokens \((\d+\.\d) tokens/s decode\), "
    r"first token after \d+\.\d\d s"
)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch) -> None:
    """Tests leave nothing in the user's cache, and JAX's configuration as it is."""
    monkeypatch.setattr(generate, "use_compilation_cache", lambda: None)


@pytest.fixture
def settings(monkeypatch) -> dict:
    """`LLM` builds no new engine: it takes the shared one, and says here how it was called."""
    settings = {}

    def shared(model: str, **given: object) -> LLM:
        settings.update(given, model=model)
        llm = tiny_llm()
        sink = open_sink(given["trace"])  # type: ignore[arg-type]
        monkeypatch.setattr(llm, "_trace", sink)
        monkeypatch.setattr(llm.engine, "_emit", sink)
        monkeypatch.setattr(llm.engine, "run_stats", [])
        return llm

    monkeypatch.setattr("jaxpaged.llm.LLM", shared)
    return settings


def main(*arguments: str) -> int:
    return generate.main(["--max-tokens", "9", "--ignore-eos", *arguments])


def expected(text: str, chat: bool = True) -> str:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm = tiny_llm()
    message = [{"role": "user", "content": text}]
    outputs = llm.chat(message, params, use_tqdm=False) if chat else llm.generate(text, params, use_tqdm=False)
    return outputs[0].outputs[0].text


def test_one_prompt_streams(settings, monkeypatch) -> None:
    class Writes(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    writes: list[str] = []
    text = expected("Hello")
    monkeypatch.setattr(sys, "stdout", Writes())
    assert main("Hello") == 0
    assert "".join(writes) == f"{text}\n"
    assert sum(bool(piece.strip()) for piece in writes) >= 3  # in several pieces


def test_many_prompts(settings, capsys) -> None:
    texts = ["Hello", "a b", "?"]
    answers = [expected(text) for text in texts]
    assert main(*texts) == 0
    out, err = capsys.readouterr()
    blocks = [f"[{i}] {text}\n{answer}\n" for i, (text, answer) in enumerate(zip(texts, answers, strict=True))]
    assert out == "\n".join(blocks) + "\n"
    assert "3/3" in err and "output tokens/s" in err
    summary = SUMMARY.fullmatch(err.splitlines()[-1])
    assert summary and int(summary[3]) == 27
    assert int(summary[1]) == sum(len(text) + 3 for text in texts)  # a token a character, and those of the template
    assert float(summary[4]) > 0 and float(summary[2]) < 1e7


def test_chat_is_the_default_and_raw_turns_it_off(settings, capsys, monkeypatch) -> None:
    chat, raw = expected("Hello"), expected("Hello", chat=False)
    assert chat != raw
    for arguments, answer in [((), chat), (("--chat",), chat), (("--raw",), raw)]:
        assert main("Hello", *arguments) == 0
        assert capsys.readouterr().out == f"{answer}\n"
    monkeypatch.setattr(tiny_llm().get_tokenizer(), "chat_template", None)
    assert main("Hello") == 0
    assert capsys.readouterr().out == f"{raw}\n"
    assert main("Hello", "--chat") == 1
    assert error(capsys) == "--chat needs a chat template, and this model has none: use --raw"


def test_prompts_from_a_file_and_from_standard_input(settings, capsys, monkeypatch, tmp_path) -> None:
    answers = [expected("Hello"), expected("a\u2028b")]
    wanted = f"[0] Hello\n{answers[0]}\n\n[1] a\u2028b\n{answers[1]}\n\n"
    text = "Hello\r\n\n  \na\u2028b"  # blank lines are no prompts; a line ends at a newline only
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert main("--file", str(tmp_path / "prompts.txt")) == 0
    assert capsys.readouterr().out == wanted
    monkeypatch.setattr(sys, "stdin", io.StringIO(text.replace("\r", "")))
    assert main() == 0
    assert capsys.readouterr().out == wanted


def test_a_model_without_a_tokenizer_takes_ids(settings, capsys, monkeypatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    token_ids = [output.outputs[0].token_ids for output in tiny_llm().generate([[5, 6], [7]], params, use_tqdm=False)]
    monkeypatch.setattr(tiny_llm(), "_tokenizer", None)
    shown = [" ".join(map(str, ids)) for ids in token_ids]
    assert main("5, 6") == 0
    assert capsys.readouterr().out == f"{shown[0]} \n"
    assert main("5 6", "7") == 0
    assert capsys.readouterr().out == f"[0] 5 6\n{shown[0]} \n\n[1] 7\n{shown[1]} \n\n"
    for arguments, says in [
        (("Hello",), "this model has no tokenizer: give token ids, like '1 2 3', not 'Hello'"),
        (("5 200",), "prompt_token_ids[1] = 200 is outside the vocabulary of 128 tokens"),
        (("5 6", "--chat"), "--chat needs a chat template, and this model has no tokenizer"),
    ]:
        assert main(*arguments) == 1
        assert error(capsys) == says


def test_an_answer_without_text_is_empty(settings, capsys, monkeypatch) -> None:
    monkeypatch.setattr(tiny_llm().get_tokenizer(), "decode", lambda *args, **kwargs: "")
    assert main("Hello", "a") == 0
    assert capsys.readouterr().out == "[0] Hello\n\n\n[1] a\n\n\n"


@pytest.mark.parametrize("texts", [["Hello"], ["Hello", 'quote " \\ \U0001f600']])
def test_json(settings, capsys, texts) -> None:
    assert main(*texts, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [entry["prompt"] for entry in result["outputs"]] == texts
    for entry in result["outputs"]:
        assert set(entry) == {
            "request_id",
            "prompt",
            "prompt_token_ids",
            "text",
            "token_ids",
            "finish_reason",
            "num_cached_tokens",
        }
        assert entry["text"] == expected(entry["prompt"])
        assert len(entry["token_ids"]) == 9 and entry["finish_reason"] == "length"
    stats = result["stats"]
    assert stats["output_tokens"] == 9 * len(texts)
    assert stats["prompt_tokens"] == sum(len(entry["prompt_token_ids"]) for entry in result["outputs"])
    for phase in ("prefill", "decode"):
        assert stats[f"{phase}_seconds"] >= 0 and stats[f"{phase}_tokens_per_second"] >= 0
    assert stats["seconds_to_first_token"] > 0


def test_traces(settings, capsys, tmp_path) -> None:
    """On standard error, or in a file, as text or JSON lines: the same steps."""
    texts = ["Hello there", "a", "Why?"]
    tiny_llm().reset_prefix_cache()
    assert main("--trace", "--", *texts) == 0
    out, err = capsys.readouterr()
    assert out.startswith("[0] Hello there\n")
    assert "%" not in err  # no progress bar between its lines
    lines = [line for line in err.splitlines() if re.match(r"[A-Z -]+:? (seq\[|step=)|seq\[", line)]
    shown = list(parse_text(lines))
    traces = [shown]
    for name in ("trace.txt", "with space.jsonl"):
        tiny_llm().reset_prefix_cache()
        assert main(*texts, "--trace", str(tmp_path / name)) == 0
        assert "3/3" in capsys.readouterr().err
        lines = (tmp_path / name).read_text().splitlines()
        traces.append(list(read_jsonl(lines) if name.endswith("jsonl") else parse_text(lines)))
    for events in traces:
        limits = {k: SIZES[k] for k in ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens")}
        assert check_events(events, **limits) == []
        assert sum(isinstance(event, Finished) for event in events) == 3
        assert [type(event) for event in events] == [type(event) for event in shown]
    # One prompt with the trace on standard error is shown when it is done.
    assert main("Hello", "--trace") == 0
    assert capsys.readouterr().out == f"[0] Hello\n{expected('Hello')}\n\n"


def test_settings_reach_the_engine(settings, capsys) -> None:
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 7, "block_size": 8, "num_blocks": 5, "max_model_len": 40}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main("a", *flags, "--dtype", "bfloat16", "--schedule", "prefill_first", "--seed", "3", "--model", "m") == 0
    assert settings.items() >= {**given, "dtype": "bfloat16", "schedule": "prefill_first", "seed": 3}.items()
    assert settings["model"] == "m" and settings["trace"] is False
    assert main("a") == 0
    assert settings["model"] == "smollm2-135m-instruct" and settings["num_blocks"] is None


def test_temperature_and_seed(settings, capsys) -> None:
    def out(*arguments: str) -> str:
        assert main("Hello", *arguments) == 0
        return capsys.readouterr().out

    hot = [out("--temperature", "1.5", "--seed", str(seed)) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2] and out() not in hot


def error(capsys) -> str:
    """The one line of a refusal; nothing is on standard output."""
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert out == "" and err.endswith(line + "\n") and "Traceback" not in err
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a", "--temperature", "nan"], "temperature must be a finite number of at least 0, not nan"),
        (["a", "--temperature", "-1"], "temperature must be a finite number of at least 0, not -1.0"),
        (["a", "--max-tokens", "0"], "max_tokens must be an integer from 1 to 2147483647, not 0"),
        (["a", "--seed", "-1"], "seed must be None or an integer from 0 to 4294967295, not -1"),
        (["a", "--num-blocks", "0"], "num_blocks must be an integer of at least 1, not 0"),
        (["a", "--num-blocks", "1000000000"], "num_blocks=1000000000 of block_size=256 take "),
        (["a", "--block-size", "0"], "block_size must be an integer of at least 1, not 0"),
        (["a", "--max-num-seqs", "0"], "max_num_seqs must be an integer of at least 1, not 0"),
        (["a", "--max-num-batched-tokens", "-5"], "max_num_batched_tokens must be an integer of at least 1, not -5"),
        (["a", "--max-model-len", "1000"], "max_model_len is 1000, the model was made for 128 tokens"),
        (["a", "--model", "no such"], "no such: no such file or folder, and not a packaged model"),
        (["a", "--model", "{tmp}"], "{tmp}/config.json: no such file"),
        (["a", "--file", "x"], "give prompts as arguments or with --file, not both"),
        (["--file", "{tmp}/none"], "{tmp}/none cannot be read: No such file or directory"),
        (["--file", "{tmp}"], "{tmp} cannot be read: Is a directory"),
        (["--file", "{tmp}/blank"], "no prompt in {tmp}/blank: it has no line with text"),
        (["--file", "{tmp}/latin"], "{tmp}/latin: not UTF-8 text: 'utf-8' codec"),
        ([], "no prompt in standard input: it has no line with text"),
        (["--trace"], "no prompt in standard input: it has no line with text"),
        (["--trace", "What is it?"], "--trace took a prompt for its FILE: put -- before the prompts"),
        (["--trace", "What is 2.5 more?", "b"], "--trace took a prompt for its FILE: put -- before the prompts"),
        (["b", "--trace", "A whole story."], "--trace took a prompt for its FILE: put -- before the prompts"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, arguments, says) -> None:
    (tmp_path / "blank").write_text("\n  \n")
    (tmp_path / "latin").write_bytes(b"na\xefve")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    monkeypatch.setattr(generate, "DEFAULT_MODEL", str(tiny_folder()))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert generate.main([word.format(tmp=tmp_path) for word in arguments]) == 1
    assert error(capsys).startswith(says.format(tmp=tmp_path))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a" * 62], "a prompt of 65 tokens is refused: it needs 66 tokens, max_model_len is 64"),
        (["b", "a" * 62], "prompts[1]: a prompt of 65 tokens is refused: it needs 66 tokens, max_model_len is 64"),
        (["--raw", ""], "prompt is empty, and the model's tokenizer adds no BOS token"),
        (["\udcff"], "prompt is not valid Unicode text: "),
        (["a", "--trace", "/none/trace.txt"], "trace: /none/trace.txt cannot be written: No such file or directory"),
    ],
)
def test_a_bad_prompt_is_one_line(settings, capsys, arguments, says) -> None:
    assert main(*arguments) == 1
    assert error(capsys).startswith(says)


@pytest.mark.parametrize(
    "arguments",
    [["--no-such"], ["--max-token", "3"], ["--max-tokens", "x"], ["--dtype", "int4"], ["--schedule", "lifo"],
     ["--chat", "--raw"], ["--temperature"]],
)  # fmt: skip
def test_unknown_options(capsys, arguments) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main(["a", *arguments])
    assert caught.value.code == 2 and "error: " in capsys.readouterr().err


def test_an_interrupt(settings, capsys, monkeypatch) -> None:
    def interrupted(max_steps: int) -> list:
        raise KeyboardInterrupt

    for prompts in (["Hello"], ["Hello", "a"]):
        with monkeypatch.context() as patch:
            patch.setattr(tiny_llm().engine, "run", interrupted)
            assert main(*prompts) == 130
        assert "Traceback" not in capsys.readouterr().err
        assert not tiny_llm().engine.has_unfinished_requests()


def test_memory_runs_out(settings, capsys, monkeypatch) -> None:
    def too_much(max_steps: int) -> list:
        raise MemoryError("out of\nmemory")

    monkeypatch.setattr(tiny_llm().engine, "run", too_much)
    assert main("Hello") == 1
    assert error(capsys) == "out of memory"
