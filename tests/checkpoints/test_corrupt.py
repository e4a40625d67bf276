"""Truncated, edited and hostile files: one clear line that names the file, soon, and without a large allocation."""

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import checkpoints
from checkpoints import gguf_file
from jaxpaged.models import Llama
from tests.checkpoints.files import smallest, write_folder, write_gguf

FUZZ_CASES = int(os.environ.get("FUZZ_CASES", "300"))
EXTREME = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def try_load(path: Path) -> Llama | str:
    """The model, or the one line of its refusal. Anything else that happens fails the test."""
    try:
        return checkpoints.load(path)[1]
    except (ValueError, FileNotFoundError) as error:
        line = str(error)
        assert str(path) in line and "\n" not in line and len(line) < 1000, line
        return line


def refusal(path: Path) -> str:
    result = try_load(path)
    assert isinstance(result, str), "loaded"
    return result.replace(str(path), "PATH")


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "folder", *smallest())


@pytest.fixture
def gguf_path(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", *smallest(), Kind.F32)
    return tmp_path / "tiny.gguf"


def test_every_truncation_is_refused(folder, gguf_path):
    weights = folder / "model.safetensors"
    for file, path in ((weights, folder), (gguf_path, gguf_path)):
        data = file.read_bytes()
        for size in {*range(0, 40), *range(0, len(data), 97), len(data) - 33, len(data) - 1}:
            file.write_bytes(data[:size])
            line = refusal(path)
            assert size > 0 or "empty" in line, line
        file.write_bytes(data)
        assert isinstance(try_load(path), Llama)


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**40, 5000, 0])
def test_safetensors_header_length(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", size) + file.read_bytes()[8:])
    assert "safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data_offsets": [0, 10**6]}, "truncated"),
        ({"data_offsets": [-32, 0]}, "data_offsets"),
        ({"data_offsets": [32, 0]}, "not in the file"),
        ({"data_offsets": [0, 2**64]}, "not in the file"),
        ({"data_offsets": [0]}, "not two offsets"),
        ({"data_offsets": None}, "data_offsets"),
        ({"data_offsets": [0.0, 32.0]}, "data_offsets"),
        ({"data_offsets": [8, 40]}, "expected"),
        ({"shape": [2**62, 2**62]}, "does not fill"),
        ({"shape": [-8]}, "shape"),
        ({"shape": [True] * 8}, "shape"),
        ({"shape": "8"}, "shape"),
        ({"shape": [1] * 40}, "shape"),
        ({"dtype": "F8_E4M3"}, r"dtype 'F8_E4M3' is not supported"),
        ({"dtype": ["F32"]}, "dtype"),
        ({"dtype": "BF16"}, "does not fill"),
    ],
)
def test_a_safetensors_entry_that_lies_is_named(folder, changes, says):
    def edit(header: dict) -> None:
        header["model.norm.weight"] |= changes

    edit_header(folder / "model.safetensors", edit)
    line = refusal(folder)
    assert says in line and "'model.norm.weight'" in line and "model.safetensors" in line, line


def test_a_safetensors_header_that_is_something_else(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    values = data[8 + struct.unpack("<Q", data[:8])[0] :]
    for header, says in [
        (b"[]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b"[" * 100000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "a key comes twice"),
        (b'{"a": 1}', "tensor 'a': its header entry is not an object"),
        (b"{}", "belong to none"),
    ]:
        file.write_bytes(struct.pack("<Q", len(header)) + header + values)
        assert says in refusal(folder)
    file.write_bytes(data + b"\0")
    assert "1 bytes after the last tensor" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"\x80", "not valid JSON"),
        (b"[" * 10**6, "not valid JSON"),
        (b"{}", "model_type is missing"),
        (b'{"model_type": "llama"}', "hidden_size is missing"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_files(folder, name, text, says):
    (folder / name).write_bytes(text)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
        says = "weight_map is missing" if "model_type" in says or "hidden_size" in says else says
    if name == "generation_config.json" and "is missing" in says:
        return  # nothing is required in it
    assert says in refusal(folder) and f"{name}: " in refusal(folder)


def test_files_that_are_not_files(folder, gguf_path, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "PATH: not a regular file"
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "not a regular file" in refusal(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert "config.json" in refusal(folder)
    assert "config.json: no such file" in refusal(tmp_path)


# Where the numbers of a GGUF stand: magic, version, number of tensors, number of fields, then the first key's length.
@pytest.mark.parametrize(
    ("offset", "bytes_", "says"),
    [
        (0, b"GGML", "not a GGUF file"),
        (0, b"FUGG", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1 is not supported"),
        (4, struct.pack(">I", 3), "version 50331648 is not supported"),
        (8, struct.pack("<Q", 2**64 - 1), "18446744073709551615 entries do not fit"),
        (8, struct.pack("<Q", 10**6), "entries do not fit"),
        (8, struct.pack("<Q", 0), "layers are configured"),
        (16, struct.pack("<Q", 2**63), "entries do not fit"),
        (16, struct.pack("<Q", 0), ""),
        (24, struct.pack("<Q", 2**63), "entries do not fit"),
        (24, struct.pack("<Q", 2**64 - 8), "entries do not fit"),
        (32, b"\xff", "not valid UTF-8"),
    ],
)
def test_gguf_header(gguf_path, offset, bytes_, says):
    data = bytearray(gguf_path.read_bytes())
    data[offset : offset + len(bytes_)] = bytes_
    gguf_path.write_bytes(data)
    assert says in refusal(gguf_path)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dims", 0, "dimensions are not 1 to 4"),
        ("dims", 2**32 - 1, "dimensions are not 1 to 4"),
        ("size", 2**64 - 1, "truncated"),
        ("size", 2**61, "truncated"),
        ("size", 9, ""),
        ("kind", 99, "type 99 is not supported (supported: F32, F16"),
        ("kind", 16, "type IQ2_XXS is not supported"),
        ("kind", Kind.Q4_0, "a row of 8 is not a multiple of the 32"),
        ("offset", 2**64 - 32, "truncated"),
        ("offset", 2**63, "truncated"),
        ("offset", 4, "its offset 4 is not a multiple of 32"),
        ("offset", 32, "shares bytes with another tensor"),
    ],
)
def test_a_gguf_tensor_that_lies_is_named(gguf_path, field, value, says):
    data = gguf_path.read_bytes()
    name = b"output_norm.weight"
    start = data.index(name) + len(name)
    place, form = {"dims": (0, "<I"), "size": (4, "<Q"), "kind": (12, "<I"), "offset": (16, "<Q")}[field]
    packed = struct.pack(form, value)
    gguf_path.write_bytes(data[: start + place] + packed + data[start + place + len(packed) :])
    line = refusal(gguf_path)
    assert says in line and ("'output_norm.weight'" in line or "shares" in line), line


def test_gguf_fields_that_lie(gguf_path):
    data = gguf_path.read_bytes()
    key = b"tokenizer.ggml.tokens"
    start = data.index(key) + len(key)
    for place, packed, says in [
        (0, struct.pack("<I", 77), "value type 77 is not supported"),
        (4, struct.pack("<I", 9), "value type 9 is not supported"),  # lists of lists
        (8, struct.pack("<Q", 2**61), "field 'tokenizer.ggml.tokens': 2305843009213693952 entries do not fit"),
    ]:
        gguf_path.write_bytes(data[: start + place] + packed + data[start + place + len(packed) :])
        assert says in refusal(gguf_path)
    gguf_path.write_bytes(data.replace(b"llama.rope.freq_base", b"llama.context_length"))
    assert refusal(gguf_path) == "PATH: field 'llama.context_length': comes twice"


def test_gguf_alignment(tmp_path):
    for alignment in (0, 3, 2**31):
        path = tmp_path / f"{alignment}.gguf"
        key = b"general.alignment"
        header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
        path.write_bytes(header + struct.pack("<II", 4, alignment) + bytes(64))
        with pytest.raises(ValueError, match=r"'general\.alignment': .* not a power of two"):
            gguf_file.read(path)


def test_a_corrupt_block_scale_is_refused(tmp_path):
    config, tensors = smallest()
    config |= dict(hidden_size=32, head_dim=4)
    tensors = {name: np.resize(tensor, [32 if size == 8 else size for size in tensor.shape])
               for name, tensor in tensors.items()}  # fmt: skip
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.resize(tensors["model.embed_tokens.weight"], (8, 32))
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.resize(tensors["model.embed_tokens.weight"], (32, 8))
    path = tmp_path / "q.gguf"
    write_gguf(path, config, tensors, Kind.Q8_0)
    assert isinstance(try_load(path), Llama)
    scale = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    file = gguf_file.read(path)
    data = bytearray(path.read_bytes())
    raw = file.tensors["blk.0.ffn_up.weight"].read.args[0].tobytes()
    start = data.index(raw)
    data[start : start + 2] = scale.tobytes()
    path.write_bytes(data)
    assert refusal(path) == "PATH: tensor 'blk.0.ffn_up.weight': holds values that are not finite; corrupt?"


@pytest.mark.parametrize("form", ["safetensors", "gguf", "config.json", "index"])
def test_mutations_only_give_clear_errors(tmp_path, form):
    rng = np.random.default_rng(len(form))
    if form == "gguf":
        path = file = tmp_path / "tiny.gguf"
        write_gguf(path, *smallest(), Kind.F32)
    else:
        path = write_folder(tmp_path / "folder", *smallest(), shards=2 if form == "index" else 1)
        name = {"safetensors": "model.safetensors", "index": "model.safetensors.index.json"}.get(form, form)
        file = path / name
    data = file.read_bytes()
    try_load(path)  # so that what a first load imports is not counted
    tracemalloc.start()
    loaded = slowest = 0.0
    for _ in range(FUZZ_CASES):
        file.write_bytes(mutate(rng, data))
        start = time.perf_counter()
        loaded += isinstance(try_load(path), Llama)
        slowest = max(slowest, time.perf_counter() - start)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6 and slowest < 5
    assert loaded < FUZZ_CASES * 0.8  # else the mutations miss what matters


def mutate(rng: np.random.Generator, data: bytes) -> bytes:
    """A few changes to a file, mostly near its start, where the structure is."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(min(rng.exponential(len(out) / 4), len(out) - 1))
        kind = rng.integers(7)
        if kind == 0:
            out[at : at + 1] = rng.bytes(1)
        elif kind == 1:
            out[at : at + 8] = struct.pack("<Q", EXTREME[rng.integers(len(EXTREME))])
        elif kind == 2:
            out[at : at + 4] = struct.pack("<I", EXTREME[rng.integers(5)])
        elif kind == 3:
            del out[at : at + int(rng.integers(1, 9))]
        elif kind == 4:
            out[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 5:
            out[at : at + 1] = b'0123456789-.eE{}[]",:\\ntf'[int(rng.integers(24)) :][:1]
        else:
            out[at] ^= 1 << int(rng.integers(8))
    if rng.random() < 0.1:
        del out[int(rng.integers(len(out) + 1)) :]
    return bytes(out)


def edit_header(file: Path, edit: Callable[[dict], None]) -> None:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
