"""Text that streams equals text that is decoded at once."""

# ruff: noqa: RUF001 - text in many scripts is the point

import json
from itertools import chain, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jaxpaged.tokenizer import Detokenizer, load_tokenizer
from jaxpaged.tokenizer import detokenizer as module
from tests.tokenizer import files, golden

TEXTS = [
    "The sky is blue.",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 🇩🇪🇯🇵 👍🏽",
    "東京は日本の首都。𠮷 龘 你好，世界！한국어",
    "مرحبا بالعالم שלום",
    "  leading\n\n\n\ttabs   and spaces  ",
    "Z\u0351\u036b\u0343e\u0301 𝔘𝔫𝔦 𓀀𓂀",
]
REPLACEMENT = "\ufffd"
SPACES, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


class Ids:
    """The ids of a tokenizer: those of tokens that are no whole character, and lists of lists to draw: any ids, those
    and special ones often, some beyond the vocabulary."""

    def __init__(self, tokenizer):
        names = [tokenizer.convert_ids_to_tokens(token_id) for token_id in range(len(tokenizer))]
        numbered = [token_id for token_id, name in enumerate(names) if name.startswith("<0x")]
        broken = (token_id for token_id in range(len(tokenizer)) if REPLACEMENT in tokenizer.decode([token_id]))
        self.of_bytes = numbered or list(broken)
        any_id = st.integers(0, len(tokenizer) - 1) | st.just(len(tokenizer) + 5)
        token_id = any_id | st.sampled_from(self.of_bytes) | st.sampled_from(sorted(tokenizer.added_tokens_decoder))
        self.chunks = st.lists(st.lists(token_id, max_size=4), max_size=30)


@pytest.fixture(scope="module")
def smollm2_ids(smollm2):
    return Ids(smollm2)


@pytest.fixture(scope="module")
def gemma3_ids(gemma3):
    return Ids(gemma3)


def pieces(tokenizer, chunks, **options):
    """The text of every `add` and of `finish`."""
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.add, chunks), detokenizer.finish()]


def check_whole(tokenizer, chunks):
    ids = [*chain(*chunks)]
    for skip in (True, False):
        text = "".join(pieces(tokenizer, chunks, skip_special_tokens=skip))
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=400)
@given(st.data())
def test_any_ids_of_smollm2(smollm2, smollm2_ids, data):
    check_whole(smollm2, data.draw(smollm2_ids.chunks))


@settings(max_examples=200)
@given(st.data())
def test_any_ids_of_gemma3(gemma3, gemma3_ids, data):
    check_whole(gemma3, data.draw(gemma3_ids.chunks))


@pytest.mark.parametrize("name", files.TINY)
def test_any_ids_of_tiny_vocabularies(name, tmp_path):
    tokenizer = load_tokenizer(files.write(tmp_path / "a.gguf", *files.TINY[name]))

    @settings(max_examples=100)
    @given(Ids(tokenizer).chunks)
    def check(chunks):
        check_whole(tokenizer, chunks)

    check()


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_golden_ids(name, request):
    tokenizer, expected = request.getfixturevalue(name), golden.read(name)
    for ids, texts in zip(expected["token_ids"], expected["token_ids_decoded"], strict=True):
        for skip, text in zip((True, False), texts, strict=True):
            assert "".join(pieces(tokenizer, [[token_id] for token_id in ids], skip_special_tokens=skip)) == text


@settings(max_examples=300)
@given(st.data())
def test_smollm2_holds_back_one_unfinished_character(smollm2, smollm2_ids, data):
    detokenizer, ids, shown = Detokenizer(smollm2), [], ""
    for chunk in data.draw(smollm2_ids.chunks):
        ids += chunk
        shown += detokenizer.add(chunk)
        assert smollm2.decode(ids, skip_special_tokens=True) in (shown, shown + REPLACEMENT)


@settings(max_examples=200)
@given(st.data())
def test_gemma3_holds_back_only_a_run_of_bytes(gemma3, gemma3_ids, data):
    byte_ids = set(gemma3_ids.of_bytes)
    detokenizer, ids, shown = Detokenizer(gemma3, skip_special_tokens=False), [], ""
    for chunk in data.draw(gemma3_ids.chunks):
        chunk = [token_id for token_id in chunk if token_id < len(gemma3)]
        ids += chunk
        shown += detokenizer.add(chunk)
        run = next((place for place, token_id in enumerate(reversed(ids)) if token_id not in byte_ids), len(ids))
        assert shown == gemma3.decode(ids[: len(ids) - run], skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_text_token_by_token(name, text, request):
    tokenizer = request.getfixturevalue(name)
    parts = pieces(tokenizer, [[token_id] for token_id in tokenizer.encode(text, add_special_tokens=False)])
    assert "".join(parts) == text
    assert REPLACEMENT not in "".join(parts)
    assert sum(map(bool, parts)) > 1


def test_an_invalid_byte_changes_its_whole_run(gemma3):
    good, bad = (gemma3.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in run]) for run in (b"\xc3\xa9", b"\xff"))
    (word,) = gemma3.encode("word", add_special_tokens=False)
    assert pieces(gemma3, [good, [word]]) == ["", "éword", ""]
    assert pieces(gemma3, [good, bad, [word]]) == ["", "", REPLACEMENT * 3 + "word", ""]


def test_special_tokens(smollm2):
    ids = smollm2.encode("<|im_start|>a<|im_end|>")
    assert "".join(pieces(smollm2, [ids])) == "a"
    assert "".join(pieces(smollm2, [ids], skip_special_tokens=False)) == "<|im_start|>a<|im_end|>"


def test_numbers_of_numpy_and_no_tokens(smollm2):
    ids = np.array(smollm2.encode("a b"), np.int32)
    assert pieces(smollm2, [ids, [], ids[:0]]) == ["a b", "", "", ""]
    assert pieces(smollm2, []) == [""]


def test_the_work_does_not_grow_with_the_text():
    seen = []

    class Spy:
        def decode(self, tokens):
            seen.append(len(tokens))
            return "".join(tokens)

    class Shown:
        def tokens(self, token_ids):
            return [f"<0x{token_id:02X}>" if token_id < 256 else "word" for token_id in token_ids]

    text = module._TokenByToken(Shown(), Spy())
    for token_id in [300] * 500 + [65] * 500 + [300] * 500:
        text.add([token_id])
    text.finish()
    assert sum(seen) <= 6 * 1500


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([SPACES, FUSE]),
        decoders.Sequence([SPACES, BYTES, FUSE, decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([SPACES, BYTES, FUSE, decoders.Strip(" ", 2, 0)]),
    ],
)
@pytest.mark.parametrize("clean_up", [False, True])
def test_all_short_texts_of_any_decoder(decoder, clean_up):
    vocabulary = ["", "▁", "▁a", "b", "##c", "d</w>", "<0x41>", "<0xC3>", " n't"]
    backend = Tokenizer(BPE({token: token_id for token_id, token in enumerate(vocabulary)}, []))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=clean_up,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=clean_up,
    )
    for length in range(5):
        for ids in product(range(len(vocabulary)), repeat=length):
            parts = pieces(tokenizer, [[token_id] for token_id in ids])
            assert "".join(parts) == tokenizer.decode(list(ids), skip_special_tokens=True), ids


def test_folders_stream_too(smollm2, tmp_path):
    smollm2.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load_tokenizer(tmp_path)
    parts = pieces(tokenizer, [[token_id] for token_id in tokenizer.encode("a b c 👍🏽")])
    assert "".join(parts) == "a b c 👍🏽" and sum(map(bool, parts)) >= 5


def test_unknown_options_are_refused(smollm2):
    with pytest.raises(TypeError, match="skip_special"):
        Detokenizer(smollm2, skip_special=True)
