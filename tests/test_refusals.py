"""Bad input to `LLM`: one clear line that names the field, before any work."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.llm import LLM
from jaxpaged.sampling_params import SamplingParams
from tests.tiny_llm import SIZES, recorder, tiny_folder, tiny_llm, write_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

IDS = "prompt_token_ids"
PROMPT_KEYS = "a prompt has the keys 'prompt' or 'prompt_token_ids', and may have 'cache_salt'"
# Beside two good prompts this one comes second.
BAD_PROMPTS = {
    "empty text": ("", "prompt is empty, and the model's tokenizer adds no BOS token"),
    "no ids": ([], f"{IDS} is empty: a prompt needs at least one token"),
    "no ids in an array": (np.zeros(0, int), f"{IDS} is empty: a prompt needs at least one token"),
    "negative": ([5, -1], f"{IDS}[1] = -1 is outside the vocabulary of 128 tokens"),
    "too large": ([128], f"{IDS}[0] = 128 is outside the vocabulary of 128 tokens"),
    "float": ([5, 1.0], f"{IDS}[1] must be an integer, not 1.0"),
    "bool": ([True], f"{IDS}[0] must be an integer, not True"),
    "text in a list": ([5, "a"], f"{IDS}[1] must be an integer, not 'a'"),
    "nested": ([[5], [6]], f"{IDS}[0] must be an integer, not [5]"),
    "None in a list": ([5, None], f"{IDS}[1] must be an integer, not None"),
    "None": (None, f"{IDS} must be a sequence of token ids, not NoneType"),
    "bytes": (b"abc", f"{IDS} must be a sequence of token ids, not bytes"),
    "number": (7, f"{IDS} must be a sequence of token ids, not int"),
    "two axes": (np.ones((2, 2), int), f"{IDS} must have one axis, not the shape (2, 2)"),
    "lone surrogate": ("a\ud800", "prompt is not valid Unicode text: 'a\\ud800' has lone surrogates"),
    "unknown key": ({"text": "a"}, f"{PROMPT_KEYS}, not ['text']"),
    "no key": ({}, f"{PROMPT_KEYS}, not []"),
    "salt alone": ({"cache_salt": "a"}, f"{PROMPT_KEYS}, not ['cache_salt']"),
    "no salt": (
        {"prompt_token_ids": [1], "cache_salt": 7},
        "cache_salt must be text that is not empty, or None, not 7",
    ),
    "prompt of a dict": ({"prompt": [5]}, "prompt must be text, not list"),
    "ids of a dict": ({"prompt": "a", IDS: "a"}, f"{IDS} must be a sequence of token ids, not str"),
    "too long": ([5] * 64, "a prompt of 64 tokens is refused: it needs 65 tokens, max_model_len is 64"),
    "text too long": ("a" * 70, "a prompt of 70 tokens is refused: it needs 71 tokens, max_model_len is 64"),
}


@pytest.mark.parametrize(("prompt", "says"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_stops_all_before_any_runs(prompt: object, says: str) -> None:
    llm = tiny_llm()
    before = llm.engine._step, len(recorder().events), next(llm.engine._ids)
    with pytest.raises(ValueError) as caught:
        llm.generate(["Hello", prompt, [5, 6]], GREEDY, use_tqdm=False)
    assert str(caught.value) == f"prompts[1]: {says}"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        next(llm.stream(prompt, GREEDY))
    assert not llm.engine.has_unfinished_requests()
    assert (llm.engine._step, len(recorder().events), next(llm.engine._ids) - 1) == before
    if not isinstance(prompt, list | np.ndarray | bytes | int | None):
        with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
            llm.generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "prompts", [None, 5, 1.5, b"abc", {5, 6}, bytearray(b"a"), iter([[5]])], ids=lambda p: type(p).__name__
)
def test_prompts_that_are_no_prompts(prompts: object) -> None:
    with pytest.raises(ValueError, match=r"^prompts must be text, token ids, or a list of them, not \w+$"):
        tiny_llm().generate(prompts, GREEDY, use_tqdm=False)


def test_a_request_too_large_for_the_pool(monkeypatch) -> None:
    llm = tiny_llm()
    monkeypatch.setattr(
        llm.engine, "config", llm.engine.config.__class__(**{**vars(llm.engine.config), "num_blocks": 3})
    )
    with pytest.raises(ValueError, match=r"^a prompt of 6 tokens is refused: it needs 4 blocks, num_blocks is 3$"):
        llm.generate([[5] * 6], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "messages must be a list of {'role': ..., 'content': ...}, not 'hi'"),
        (None, "messages must be a list of {'role': ..., 'content': ...}, not None"),
        ({"role": "user", "content": "x"}, "messages must be a list of {'role': ..., 'content': ...}, not {"),
        ([[]], "messages must be a list of {'role': ..., 'content': ...}, not []"),
        (["hi"], "messages must be a list of {'role': ..., 'content': ...}, not 'hi'"),
        ([[{"role": "user", "content": "x"}, "hi"]], "messages[1] must be {'role': ..., 'content': ...}, not 'hi'"),
        ([{"content": "x"}], "messages[0]: 'role' must be text, not None"),
        ([{"role": "user"}], "messages[0]: 'content' must be text, not None"),
        ([{"role": "user", "content": 5}], "messages[0]: 'content' must be text, not 5"),
        ([{"role": "", "content": "x"}], "messages: the model's chat template refuses them: "),
    ],
)
def test_bad_conversations(messages: object, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        tiny_llm().chat(messages, GREEDY, use_tqdm=False)
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


def test_a_chat_without_a_template(monkeypatch) -> None:
    monkeypatch.setattr(tiny_llm().get_tokenizer(), "chat_template", None)
    with pytest.raises(ValueError, match=r"^this model has no chat template: use generate\(\)$"):
        tiny_llm().chat([{"role": "user", "content": "x"}])


INT = "must be an integer of at least 1, not "


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *((f, v, f"{f} {INT}{v!r}") for f in SIZES for v in (0, -1, 1.5, "4", True)),
        *((f, None, f"{f} {INT}None") for f in SIZES if f not in ("num_blocks", "max_model_len")),
        ("max_model_len", 129, "max_model_len is 129, the model was made for 128 tokens"),
        ("max_model_len", np.int64(10**6), "max_model_len is 1000000, the model was made for 128 tokens"),
        ("max_model_len", 1, "max_model_len must be at least 2 (a prompt token and an output token), not 1"),
        ("num_blocks", 10**9, "num_blocks=1000000000 of block_size=4 take "),
        ("max_num_seqs", 10**9, "max_num_seqs=1000000000, max_num_waiting=2 and max_model_len=64 take "),
        ("schedule", "fifo", "schedule must be one of ['mixed', 'prefill_first'], not 'fifo'"),
        ("schedule", None, "schedule must be one of ['mixed', 'prefill_first'], not None"),
        ("dtype", "float16", "dtype must be one of ['auto', 'float32', 'bfloat16'], not 'float16'"),
        ("dtype", np.float32, "dtype must be one of ['auto', 'float32', 'bfloat16'], not <class"),
        ("dtype", None, "dtype must be one of ['auto', 'float32', 'bfloat16'], not None"),
        *(("attention_implementation", v, "the attention implementation must be one of [") for v in ("fast", 5, [])),
        *(("seed", v, f"seed must be an integer of at least 0, not {v!r}") for v in (-1, 1.5, None, "7", True)),
        ("trace", 5, "trace must be True, False, a path or a function, not 5"),
        ("trace", None, "trace must be True, False, a path or a function, not None"),
    ],
)
def test_bad_settings(field: str, value: object, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        LLM(tiny_folder(), **(SIZES | {field: value}))
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


def test_a_kernel_that_does_not_take_the_model(monkeypatch) -> None:
    """It is refused before the weights are read, and nothing else is taken in its place."""
    monkeypatch.setattr("checkpoints.Checkpoint.plan", None)
    with pytest.raises(
        NotImplementedError, match=r"block_size 4 .*takes multiples of 16.*head_dim .*takes 64, 96, 128"
    ):
        LLM(tiny_folder(), attention_implementation="tpu", dtype="bfloat16", **SIZES)


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_a_kernel_of_another_platform(monkeypatch, name: str) -> None:
    monkeypatch.setattr("jaxpaged.llm.check_kv_pool", lambda *args: (None, args[-1]))
    with pytest.raises(ValueError, match=f"'{name}' needs a {name.upper()}, .*: choose 'reference', or '{name}_interp"):
        LLM(tiny_folder(), attention_implementation=name, **SIZES)


def test_a_trace_that_cannot_be_written(tmp_path) -> None:
    with pytest.raises(OSError, match=re.escape(f"trace: {tmp_path}/none/trace.txt cannot be written: No such")):
        LLM(tiny_folder(), trace=tmp_path / "none" / "trace.txt", **SIZES)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def set_key(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("model.safetensors", Path.unlink, "holds no weights"),
        ("model.safetensors", lambda f: truncate(f, 0), "model.safetensors: .*empty"),
        ("model.safetensors", lambda f: truncate(f, 5000), "model.safetensors: .*truncated"),
        ("model.safetensors", lambda f: f.write_bytes(b"\xff" * 5000), "model.safetensors: "),
        ("config.json", Path.unlink, "config.json: no such file"),
        ("config.json", lambda f: truncate(f, 0), "config.json: .*empty"),
        ("config.json", lambda f: truncate(f, 100), "config.json: not valid JSON"),
        ("config.json", lambda f: set_key(f, "model_type", "mamba"), "config.json: .*model_type.*mamba.*llama"),
        ("config.json", lambda f: set_key(f, "num_hidden_layers", 2), "no place for: 'model.layers.2"),
        ("config.json", lambda f: set_key(f, "num_hidden_layers", 4), "missing tensors: 'model.layers.3"),
        ("config.json", lambda f: set_key(f, "intermediate_size", 49), "another shape .* .48, 64., not .49, 64."),
        ("tokenizer.json", lambda f: truncate(f, 100), ": the tokenizer cannot be loaded: "),
        ("tokenizer.json", Path.unlink, "has a tokenizer_config.json but none of tokenizer.json"),
    ],
)
def test_damaged_folders(tmp_path, file: str, damage, says: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    damage(folder / file)
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{re.escape(str(folder))}.*{says}") as caught:
        LLM(folder, **SIZES)
    assert "\n" not in str(caught.value)


def test_damaged_gguf_files(tmp_path) -> None:
    for data, says in [(b"", "empty"), (b"GGUF", "truncated"), (b"nonsense" * 99, "not a GGUF file")]:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{says}"):
            LLM(path, **SIZES)


def test_models_that_are_not_there(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file or folder, and not a packaged model"):
        LLM(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(str(tmp_path))}/config.json: no such file"):
        LLM(tmp_path)


def test_a_tokenizer_that_is_larger_than_the_model(tmp_path) -> None:
    """Ids that the model does not know are refused where they come up."""
    llm = tiny_llm()
    original = llm.get_tokenizer()
    write_tokenizer(tmp_path)
    other = original.__class__.from_pretrained(tmp_path)
    other.add_tokens(["Hello"])
    llm._tokenizer = other
    try:
        with pytest.raises(ValueError, match=r"\[0\] = 128 is outside the vocabulary of 128 tokens"):
            llm.generate("Hello", GREEDY, use_tqdm=False)
    finally:
        llm._tokenizer = original


@pytest.mark.parametrize("model", [None, 3, "", b"path"])
def test_a_model_that_is_no_path(model: object) -> None:
    with pytest.raises(ValueError, match="model must be a path or the name of a packaged model, not "):
        LLM(model)
