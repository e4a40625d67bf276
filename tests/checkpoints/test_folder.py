"""Folders in Hugging Face layout: every way to store the same model, and every way to get it wrong."""

import json
import pickle

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import checkpoints
from checkpoints.rules import LLAMA_GGUF, LLAMA_HF
from jaxpaged.models import Llama, ModelConfig, param_shapes
from tests.checkpoints.files import GOLDEN, golden_folder, smallest, write_folder

LAYER = "model.layers.0."


def parameter(model: Llama, name: str) -> np.ndarray:
    """A parameter by its name in the model, as numpy."""
    value = model
    for part in name.split("."):
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
    return np.asarray(value[...])


def check_equal(model: Llama, tensors: dict[str, np.ndarray]) -> None:
    """The model holds the (f32) tensors of a folder exactly."""
    assert np.array_equal(parameter(model, "embedding.table"), tensors["model.embed_tokens.weight"])
    assert np.array_equal(parameter(model, "final_norm.scale"), tensors["model.norm.weight"])
    for ours, theirs in {"attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
                         "mlp.gate": "mlp.gate_proj", "mlp.down": "mlp.down_proj"}.items():  # fmt: skip
        assert np.array_equal(parameter(model, f"layers.0.{ours}.kernel"), tensors[f"{LAYER}{theirs}.weight"].T)


def test_every_variant_loads_and_every_tensor_has_its_place():
    for variant in ("tied", "untied", "biases"):
        config, model = checkpoints.load(GOLDEN / f"llama_{variant}")
        _, tensors = golden_folder(variant)
        check_equal(model, tensors)
        assert (model.head is None) == (variant == "tied")
        assert config == checkpoints.read_config(GOLDEN / f"llama_{variant}")
        keys = [LLAMA_HF.find(path)[0] for path in param_shapes(config, np.float32)]
        assert sorted(keys) == sorted(tensors)


@pytest.mark.parametrize("table", [LLAMA_HF, LLAMA_GGUF])
def test_each_key_and_each_parameter_has_one_rule(table):
    for names in ([rule.key for rule in table.rules], [rule.target for rule in table.rules]):
        assert len(set(names)) == len(names)
    every = ModelConfig.from_hf(golden_folder("biases")[0])
    targets = {table.find(path)[1].target for path in param_shapes(every, np.float32)}
    assert targets == {rule.target for rule in table.rules}
    with pytest.raises(LookupError, match=r"layers\.\{\}\.mlp\.up\.kernels"):
        table.find(("layers", 3, "mlp", "up", "kernels"))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_dtypes_and_shards(tmp_path, stored, shards):
    config, tensors = smallest()
    tensors = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    write_folder(tmp_path, config, tensors, shards)
    _, model = checkpoints.load(tmp_path, np.float32)
    check_equal(model, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    _, model = checkpoints.load(tmp_path, jnp.bfloat16)
    assert parameter(model, "layers.0.mlp.up.kernel").dtype == jnp.bfloat16
    check_equal(model, {name: tensor.astype(np.float32).astype(jnp.bfloat16) for name, tensor in tensors.items()})


def test_a_model_does_not_change_with_its_file(tmp_path):
    config, tensors = smallest()
    write_folder(tmp_path, config, tensors)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    # Values at a multiple of 64 bytes are where a device array on the CPU may share memory with the mapped file.
    header = data[8 : 8 + size].ljust(-(-(8 + size) // 64) * 64 - 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    _, model = checkpoints.load(tmp_path)
    with file.open("r+b") as stream:  # the same file, so that a mapping of it would see the zeros
        stream.write(bytes(file.stat().st_size))
    check_equal(model, tensors)


def test_eos_ids_are_united(tmp_path):
    config, tensors = smallest()
    write_folder(tmp_path, config, tensors)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert checkpoints.read_config(tmp_path).eos_token_ids == (2, 7, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 99}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id=99 is not"):
        checkpoints.read_config(tmp_path)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    config, tensors = smallest()
    write_folder(tmp_path, config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    _, model = checkpoints.load(tmp_path)
    assert model.head is None
    write_folder(tmp_path, config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'lm_head\.weight' differs from 'model\.embed"):
        checkpoints.load(tmp_path)


def test_rotary_buffers_of_old_files_are_ignored(tmp_path):
    config, tensors = smallest()
    old = {LAYER + "self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    check_equal(checkpoints.load(write_folder(tmp_path, config, tensors | old))[1], tensors)


def test_names_and_shapes(tmp_path):
    config, tensors = smallest()
    up, norm = LAYER + "mlp.up_proj.weight", "model.norm.weight"

    def refused(says: str, tensors: dict, **changes: object) -> None:
        with pytest.raises(ValueError, match=says) as caught:
            checkpoints.load(write_folder(tmp_path, config | changes, tensors))
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)

    refused(f"missing tensors: '{up}'$", {name: value for name, value in tensors.items() if name != up})
    refused("missing tensors: 'lm_head.weight'$", tensors, tie_word_embeddings=False)
    refused(r"missing tensors: .*q_proj\.bias', '[^ ]*v_proj\.bias'$", tensors, attention_bias=True)
    refused("missing tensors: .* and 5 more", tensors, num_hidden_layers=2)
    refused("999999 layers are configured, the weights are only 11", tensors, num_hidden_layers=999999)
    refused("no place for: 'surplus'$", tensors | {"surplus": np.zeros(3, np.float32)})
    refused("no place for: 'model.layers.00.mlp", tensors | {"model.layers.00.mlp.up_proj.weight": tensors[up].copy()})
    refused("no place for: 'model.layers.1.mlp", tensors | {"model.layers.1.mlp.up_proj.weight": tensors[up].copy()})
    refused(rf"needs: '{up}' \(8, 12\), not \(12, 8\)$", tensors | {up: tensors[up].T.copy()})
    two = {up: tensors[up].T.copy(), norm: np.zeros(9, np.float32)}
    refused(rf"needs: '{norm}' \(9,\), not \(8,\), '{up}' \(8, 12\)", tensors | two)
    refused("needs: .* and 7 more$", tensors, hidden_size=16, head_dim=4)
    refused(rf"tensor '{norm}': dtype 'I64' is not supported", tensors | {norm: np.zeros(8, np.int64)})
    refused(rf"tensor '{norm}': .* not finite", tensors | {norm: np.full(8, np.nan, np.float32)})


def test_a_missing_path_and_what_is_no_model(tmp_path):
    config, tensors = smallest()
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        checkpoints.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        checkpoints.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds no weights"):
        checkpoints.load(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"give the path of the file itself"):
        checkpoints.load(tmp_path)
    write_folder(tmp_path, config, tensors)
    for file in ("model.safetensors", "config.json"):
        with pytest.raises(ValueError, match="give the folder that holds it"):
            checkpoints.load(tmp_path / file)
    with pytest.raises(ValueError, match="dtype=float16 is not supported"):
        checkpoints.load(tmp_path, np.float16)


def test_pickles_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    (tmp_path / "config.json").write_text(json.dumps(smallest()[0]))
    for name in ("pytorch_model.bin", "model.pt", "model.pth"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(ValueError, match="never loaded: convert them to safetensors"):
            checkpoints.load(tmp_path)
        (tmp_path / name).rename(tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="not a safetensors file"):
            checkpoints.load(tmp_path)
        (tmp_path / "model.safetensors").unlink()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        ("../model-0.safetensors", "not the name of a safetensors file in the folder"),
        ("/etc/passwd", "not the name"),
        ("sub/model-0.safetensors", "not the name"),
        ("pytorch_model.bin", "not the name"),
        ("", "not the name"),
        (7, "not the name"),
        ("model-9.safetensors", r"model-9\.safetensors: no such file"),
        ("model-0.safetensors", r"model\.norm\.weight': model\.safetensors\.index\.json does not say"),
    ],
)
def test_an_index_stays_in_its_folder(tmp_path, shard, says):
    config, tensors = smallest()
    write_folder(tmp_path, config, tensors, shards=2)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    assert index["weight_map"]["model.norm.weight"] != shard
    index["weight_map"]["model.norm.weight"] = shard
    file.write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        checkpoints.load(tmp_path)


def test_an_index_and_its_shards_agree(tmp_path):
    config, tensors = smallest()
    write_folder(tmp_path, config, tensors, shards=2)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["phantom"] = "model-0.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-0\.safetensors: tensor 'phantom' is missing"):
        checkpoints.load(tmp_path)
    file.write_text("{}")
    with pytest.raises(ValueError, match="weight_map is missing or empty"):
        checkpoints.load(tmp_path)
