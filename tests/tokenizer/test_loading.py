"""Where a tokenizer comes from, and what is refused."""

import json
import struct
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jaxpaged.tokenizer import load_tokenizer
from tests.tokenizer import files

TEXTS = ["", "The sky is blue.", "  if x:\n\t\treturn 42  ", "👩‍👩‍👧‍👦 東京", "<|im_start|>user\n<|im_end|>"]
MESSAGES = [{"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory):
    """SmolLM2's tokenizer as Hugging Face folders have it, beside a model's configuration."""
    path = tmp_path_factory.mktemp("folder")
    smollm2.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(smollm2)}))
    return path


@pytest.fixture
def tiny(tmp_path):
    return files.write(tmp_path / "tiny.gguf", "llama", files.byte_level_fields())


def test_a_folder(folder, smollm2, no_network):
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer(TEXTS).input_ids == smollm2(TEXTS).input_ids
    assert tokenizer.special_tokens_map == smollm2.special_tokens_map
    chat = dict(conversation=MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(**chat) == smollm2.apply_chat_template(**chat)


def test_a_path_may_be_a_string(folder, tiny, no_network):
    assert load_tokenizer(str(folder)) is not None
    assert load_tokenizer(str(tiny)) is not None


def test_a_large_vocabulary_in_a_folder_asks_nobody(tmp_path, no_network):
    # transformers looks up some models of more than 100,000 tokens on the network.
    backend = Tokenizer(BPE({chr(0x10000 + token_id): token_id for token_id in range(100_001)}, []))
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path="a/b").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "transformers_version": "4.50.0"}))
    assert len(load_tokenizer(tmp_path)) == 100_001


def test_torch_is_not_imported(tiny):
    code = "import sys, jaxpaged.tokenizer as t; t.load_tokenizer(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tiny)], check=True)


def test_code_in_a_folder_is_not_run(folder, tmp_path, monkeypatch):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    try:
        load_tokenizer(tmp_path)
    except ValueError as error:
        assert str(tmp_path) in str(error)
    assert not (tmp_path / "ran").exists()


def test_decode_does_not_tidy_spaces(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.clean_up_tokenization_spaces is False
    assert tokenizer.decode(tokenizer("a , b . do n't").input_ids) == "a , b . do n't"


def test_none_where_there_is_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert load_tokenizer(tmp_path) is None
    for fields in ({}, {"model": "none"}, {"model": "no_vocab"}):
        assert load_tokenizer(files.write(tmp_path / "a.gguf", "llama", fields)) is None


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf"):
        load_tokenizer(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", '{"model": {"type": "BPE"}}', "\0" * 100])
def test_corrupt_tokenizer_json(tmp_path, content):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError) as raised:
        load_tokenizer(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: ") and "\n" not in str(raised.value)


def test_truncated_tokenizer_json(folder, tmp_path):
    data = (folder / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_a_folder_with_a_configuration_but_no_vocabulary(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ValueError, match=r"none of tokenizer\.json"):
        load_tokenizer(tmp_path)


BYTE_LEVEL = files.byte_level_fields()
SENTENCEPIECE = files.sentencepiece_fields()
NUM_TOKENS = len(BYTE_LEVEL["tokens"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "jabberwock"}, "tokenizer.ggml.pre='jabberwock' is not supported (supported: a.x-4.0, "),
        ({"pre": "command-r"}, "tokenizer.ggml.pre='command-r' is not supported"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"pre": 3}, "tokenizer.ggml.pre=3 is not a string"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is not supported (supported: gpt2, llama)"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens is not an array of str"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is not an array of str"),
        ({"tokens": [*BYTE_LEVEL["tokens"][:-1], "a"]}, "tokenizer.ggml.tokens has 'a' twice, as "),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges has 'a b c', which is not two tokens"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', which is not two tokens"),
        ({"merges": [" a"]}, "tokenizer.ggml.merges has ' a', which is not two tokens"),
        ({"merges": ["z zz"]}, "tokenizer.ggml.merges has 'z zz', which names a token that is not there"),
        ({"merges": ["z q"]}, "tokenizer.ggml.merges has 'z q', which names a token that is not there"),
        ({"merges": [1.5]}, "tokenizer.ggml.merges is not an array of str"),
        ({"token_type": [1, 2]}, f"tokenizer.ggml.token_type has 2 entries for {NUM_TOKENS} tokens"),
        ({"token_type": [99] * NUM_TOKENS}, "tokenizer.ggml.token_type has 99"),
        ({"token_type": ["a"] * NUM_TOKENS}, "tokenizer.ggml.token_type is not an array of int"),
        ({"bos_token_id": NUM_TOKENS}, f"tokenizer.ggml.bos_token_id={NUM_TOKENS}, but there are {NUM_TOKENS} tokens"),
        ({"eos_token_id": 2**32 - 1}, "tokenizer.ggml.eos_token_id=4294967295"),
        ({"unknown_token_id": "a"}, "tokenizer.ggml.unknown_token_id='a'"),
        ({"padding_token_id": 1.5}, "tokenizer.ggml.padding_token_id=1.5"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token=1 is not true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing"),
        ({"add_eos_token": True, "eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template=7 is not a string"),
        (SENTENCEPIECE | {"merges": None, "scores": None}, "tokenizer.ggml.scores and tokenizer.ggml.merges"),
        (SENTENCEPIECE | {"merges": None, "scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for "),
        (SENTENCEPIECE | {"merges": None, "scores": [float("nan")] * len(SENTENCEPIECE["tokens"])}, "not finite"),
        (SENTENCEPIECE | {"add_space_prefix": "no"}, "tokenizer.ggml.add_space_prefix='no' is not true or false"),
    ],
)  # fmt: skip
def test_metadata_that_is_refused(tmp_path, changes, message):
    path = files.write(tmp_path / "bad.gguf", "llama", BYTE_LEVEL | changes)
    with pytest.raises(ValueError) as raised:
        load_tokenizer(path)
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_truncated_files(tiny):
    data = tiny.read_bytes()
    for length in [*range(1, 200), *range(200, len(data) - 1, 997)]:
        tiny.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"tiny\.gguf"):
            load_tokenizer(tiny)


def test_a_length_beyond_the_file(tiny):
    data = bytearray(tiny.read_bytes())
    key = b"tokenizer.ggml.tokens"
    struct.pack_into("<Q", data, data.index(key) + len(key) + 8, 2**60)
    tiny.write_bytes(data)
    with pytest.raises(ValueError, match=r"tiny\.gguf: .*tokenizer\.ggml\.tokens"):
        load_tokenizer(tiny)
