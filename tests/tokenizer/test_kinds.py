"""Every kind of vocabulary and every way to split text against transformers' own GGUF reader."""

# ruff: noqa: RUF001 - text in many scripts is the point

import json

import pytest

from jaxpaged.tokenizer import load_tokenizer
from jaxpaged.tokenizer.byte_level import PRE_KINDS
from tests.tokenizer import files, golden

GOLDEN = golden.read("kinds")


def test_every_kind_is_in_the_golden_file():
    assert set(PRE_KINDS) == set(GOLDEN["splitters"])
    assert set(GOLDEN["tiny"]) == {*files.TINY, "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"}


@pytest.mark.parametrize("kind", PRE_KINDS)
def test_text_is_split_alike(kind, tmp_path):
    path = files.write(tmp_path / "a.gguf", "llama", files.byte_level_fields() | {"pre": kind})
    splitter = load_tokenizer(path).backend_tokenizer.pre_tokenizer
    assert json.loads(splitter.__getstate__()) == GOLDEN["splitters"][kind]


VOCABULARIES = files.TINY | {
    kind: ("llama", files.byte_level_fields() | {"pre": kind}) for kind in GOLDEN["tiny"] if kind not in files.TINY
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_and_decoding(name, tmp_path):
    architecture, fields = VOCABULARIES[name]
    tokenizer = load_tokenizer(files.write(tmp_path / "a.gguf", architecture, fields))
    expected = GOLDEN["tiny"][name]
    golden.check_ids(tokenizer, GOLDEN["texts"], expected["ids"])
    golden.check_decoded(tokenizer, expected["ids"], expected["decoded"], GOLDEN["texts"])
    assert len(tokenizer) == len(fields["tokens"])


def test_the_vocabularies_differ():
    ids = {json.dumps(vocabulary["ids"]) for name, vocabulary in GOLDEN["tiny"].items() if name != "smollm"}
    assert len(ids) == len(GOLDEN["tiny"]) - 1
    assert GOLDEN["tiny"]["smollm"] == GOLDEN["tiny"]["byte_level"]  # transformers takes both for GPT-2's kind


def test_special_tokens_that_are_not_in_the_byte_alphabet(tmp_path):
    # transformers cuts them to bytes, or gives them ids that the model does not have.
    fields = files.byte_level_fields() | {"bos_token_id": 2, "add_bos_token": True}
    tokenizer = load_tokenizer(files.write(tmp_path / "a.gguf", "llama", fields))
    text = "a<｜odd▁one｜>b"
    ids = tokenizer(text).input_ids
    assert ids[0] == ids[2] == tokenizer.bos_token_id == 2 and len(ids) == 4
    assert len(tokenizer) == len(fields["tokens"])
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<｜odd▁one｜>{text}"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_user_defined_tokens_are_matched_whole_and_shown(tmp_path):
    tokenizer = load_tokenizer(files.write(tmp_path / "a.gguf", "llama", files.byte_level_fields()))
    ids = tokenizer("x<think>y").input_ids
    assert ids[1] == 3 and tokenizer.decode(ids, skip_special_tokens=True) == "x<think>y"


def test_without_a_space_prefix(tmp_path):
    fields = files.sentencepiece_fields() | {"add_space_prefix": False}
    tokenizer = load_tokenizer(files.write(tmp_path / "a.gguf", "llama", fields))
    assert tokenizer.tokenize("the") == ["the"] and tokenizer.tokenize(" the") == ["▁the"]
    for text in ("the cat", " the cat", "  the  cat ", ""):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_eos_is_added_where_the_file_says_so(tmp_path):
    fields = files.sentencepiece_fields() | {"add_eos_token": True}
    tokenizer = load_tokenizer(files.write(tmp_path / "a.gguf", "llama", fields))
    ids = tokenizer("the").input_ids
    assert ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id


def test_no_bos_where_the_file_has_none(tmp_path):
    fields = files.sentencepiece_fields() | {"bos_token_id": None}
    tokenizer = load_tokenizer(files.write(tmp_path / "a.gguf", "llama", fields))
    assert (
        tokenizer.bos_token is None and tokenizer.tokenize("the") == ["▁the"] and len(tokenizer("the").input_ids) == 1
    )
