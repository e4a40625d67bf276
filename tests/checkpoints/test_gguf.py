"""GGUF files: every quantization, the order of the query and key rows, and what a reader must refuse."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import checkpoints
from checkpoints import gguf_file
from tests.checkpoints.files import GOLDEN, golden_folder, smallest, write_gguf
from tests.checkpoints.test_folder import check_equal, parameter


def f16(raw: np.ndarray) -> np.ndarray:
    return raw.copy().view(np.float16).astype(np.float32)


def q4_0(block: np.ndarray) -> np.ndarray:
    codes = np.concatenate([block[2:] % 16, block[2:] // 16]).astype(np.float32)
    return (codes - 8) * f16(block[:2])


def q4_1(block: np.ndarray) -> np.ndarray:
    codes = np.concatenate([block[4:] % 16, block[4:] // 16]).astype(np.float32)
    return codes * f16(block[:2]) + f16(block[2:4])


def q8_0(block: np.ndarray) -> np.ndarray:
    return block[2:].view(np.int8).astype(np.float32) * f16(block[:2])


def q6_k(block: np.ndarray) -> np.ndarray:
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8).astype(np.float32)
    out = np.empty(256, np.float32)
    for i in range(256):
        half, quarter, j = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * half + 32 * (quarter % 2) + j] >> (4 * (quarter // 2)) & 15
        top = high[32 * half + j] >> (2 * quarter) & 3
        out[i] = f16(block[208:])[0] * scales[i // 16] * (int(nibble) + 16 * int(top) - 32)
    return out


# Where the f16 scales stand in a block; any other bytes are valid.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208]}  # fmt: skip
FORMULAS = {"Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0, "Q6_K": q6_k}


def raw_tensor(kind: Kind, rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(kind)
    if kind.name in ("F32", "F16", "BF16"):
        return gguf.quantize(rng.standard_normal((rows, columns)).astype(np.float32), kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_size, block_bytes), np.uint8)
    for offset in SCALES[kind.name]:
        blocks[:, offset : offset + 2] = rng.normal(0, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", gguf_file.QUANTIZATIONS)
def test_every_quantization_reads_as_the_gguf_package_and_the_formula_say(tmp_path, name):
    kind, path = Kind[name], tmp_path / "one.gguf"
    raw = raw_tensor(kind, 6, 512)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.arange(3, dtype=np.float32))
    writer.add_tensor("second", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf_file.read(path).tensors["second"]
    values = tensor.read()
    assert tensor.shape == values.shape == (6, 512) and values.dtype == np.float32
    np.testing.assert_array_equal(values, gguf.dequantize(raw, kind))
    if name in FORMULAS:
        blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
        expected = np.concatenate([FORMULAS[name](block) for block in blocks]).reshape(6, 512)
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)
    assert np.unique(values).size > 100


def test_metadata_of_every_type(tmp_path):
    path = tmp_path / "fields.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -1)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -2)
    writer.add_int32("a.i32", -3)
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve 🙂\n")
    writer.add_array("a.strings", ["x", "", "ÿ"])
    writer.add_array("a.ints", [3, -1])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array("a.bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_file.read(path)
    assert {key: value for key, value in file.fields.items() if key.startswith("a.")} == {
        "a.u8": 255, "a.i8": -1, "a.u16": 65535, "a.i16": -2, "a.i32": -3, "a.u64": 2**64 - 1, "a.i64": -(2**63),
        "a.f32": 0.5, "a.f64": 0.1, "a.bool": True, "a.string": "naïve 🙂\n", "a.strings": ["x", "", "ÿ"],
        "a.ints": [3, -1], "a.floats": [0.5, 1.5], "a.bools": [True, False],
    }  # fmt: skip
    assert file.tensors == {}


@pytest.mark.parametrize("variant", ["tied", "untied", "biases"])
def test_a_gguf_is_the_same_model_as_the_folder_it_was_made_from(tmp_path, variant):
    hf_config, tensors = golden_folder(variant)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, hf_config, tensors, Kind.F32)
    config, model = checkpoints.load(path)
    check_equal(model, tensors)
    if variant == "biases":
        bias = tensors["model.layers.0.self_attn.q_proj.bias"]
        assert np.array_equal(parameter(model, "layers.0.attention.query.bias"), bias)
    from_folder = checkpoints.read_config(GOLDEN / f"llama_{variant}")
    assert config.rope_factors == pytest.approx(from_folder.rope_factors)
    for field in ("head_dim", "num_kv_heads", "tie_word_embeddings", "attention_bias", "mlp_bias", "vocab_size"):
        assert getattr(config, field) == getattr(from_folder, field)
    assert (config.eos_token_ids, checkpoints.read_config(path)) == ((2,), config)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantized_model_holds_the_dequantized_values(tmp_path, name):
    config, tensors = golden_folder("tied")
    values = write_gguf(tmp_path / "tiny.gguf", config, tensors, Kind[name])
    _, model = checkpoints.load(tmp_path / "tiny.gguf")
    check_equal(model, values)
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(values[key], tensors[key])
    _, model = checkpoints.load(tmp_path / "tiny.gguf", jnp.bfloat16)
    check_equal(model, {name: value.astype(jnp.bfloat16) for name, value in values.items()})


def test_names_and_shapes(tmp_path):
    config, tensors = smallest()
    path = tmp_path / "tiny.gguf"

    def refused(says: str, tensors: dict, extra: dict | None = None, **changes: object) -> None:
        write_gguf(path, config | changes, tensors, Kind.F32, extra or {})
        with pytest.raises(ValueError, match=says) as caught:
            checkpoints.load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    up = "model.layers.0.mlp.up_proj.weight"
    refused("missing tensors: 'blk.0.ffn_up.weight'$", {key: value for key, value in tensors.items() if key != up})
    refused("no place for: 'surplus.weight'$", tensors, {"surplus.weight": np.zeros(8, np.float32)})
    refused("missing tensors: 'blk.0.attn_k.bias'", tensors, {"blk.0.attn_q.bias": np.zeros(8, np.float32)})
    refused(r"needs: .*'blk.0.ffn_up.weight' \(12, 8\), not \(13, 8\)", tensors, intermediate_size=13)
    refused("rope_factors holds 3 values", tensors, {"rope_freqs.weight": np.ones(3, np.float32)})
    refused(r"'rope_freqs.weight': shape \[1, 2\]", tensors, {"rope_freqs.weight": np.ones((1, 2), np.float32)})
    nan = tensors | {up: np.full((12, 8), np.nan, np.float32)}
    refused("tensor 'blk.0.ffn_up.weight': .* not finite", nan)


def test_unknown_architecture(tmp_path):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"general\.architecture='mamba' is not supported \(supported: llama\)"):
        checkpoints.load(path)
