"""Configurations from files: both spellings of the keys, and one clear line for each wrong value."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.models import ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden"

HF = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 128,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_defaults_are_those_of_the_formats():
    config = ModelConfig.from_hf(HF)
    assert config == ModelConfig.from_gguf(GGUF, {"output.weight"})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rope_factors) == (4, 16, 10000.0, None)
    assert (config.tie_word_embeddings, config.eos_token_ids, config.bos_token_id) == (False, (), None)
    assert ModelConfig.from_gguf(GGUF).tie_word_embeddings
    hash(config)


def test_biases_of_a_gguf_show_in_its_tensors():
    names = {"output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.bias"}
    config = ModelConfig.from_gguf(GGUF, names)
    assert config.attention_bias and config.mlp_bias and not config.tie_word_embeddings


def test_old_and_new_rope_keys_agree():
    new = ModelConfig.from_hf(HF | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}})
    old = ModelConfig.from_hf(HF | {"rope_theta": 5000.0, "rope_scaling": {"type": "llama3", **LLAMA3}})
    assert new == old and new.rope_theta == 5000.0
    # The fastest frequency is kept, the slowest is slowed by the factor, and between them the factors rise.
    assert new.rope_factors[0] == 1.0 and new.rope_factors[-1] == 8.0 and len(new.rope_factors) == 8
    assert list(new.rope_factors) == sorted(new.rope_factors) and len(set(new.rope_factors)) > 2
    plain = ModelConfig.from_hf(HF | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert (plain.rope_theta, plain.rope_factors) == (7.0, None)
    linear = ModelConfig.from_hf(HF | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.rope_factors == (4.0,) * 8
    assert (
        linear.rope_factors
        == ModelConfig.from_gguf(
            GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        ).rope_factors
    )


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (7, (7,)), ([9, 2, 9], (2, 9)), ([], ())])
def test_eos_is_one_id_or_many(value, ids):
    assert ModelConfig.from_hf(HF | {"eos_token_id": value}).eos_token_ids == ids


def test_golden_configurations():
    config = ModelConfig.from_hf(json.loads((GOLDEN / "llama_biases" / "config.json").read_text()))
    assert (config.head_dim, config.attention_bias, config.mlp_bias) == (24, True, True)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 5), 1)


@pytest.mark.parametrize("key", list(HF))
def test_a_missing_key_is_named(key):
    with pytest.raises(ValueError, match=key) as caught:
        ModelConfig.from_hf({k: v for k, v in HF.items() if k != key})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", list(GGUF))
def test_a_missing_field_is_named(key):
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        ModelConfig.from_gguf({k: v for k, v in GGUF.items() if k != key})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, r"model_type='mamba' is not supported \(supported: llama\)"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported \(supported: silu\)"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, r"'yarn' is not supported \(supported: default, linear"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": 66}, "head_dim is missing"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"head_dim": 2**31 - 2}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"eos_token_id": 128}, "eos_token_id=128"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"bos_token_id": [1, 2]}, "bos_token_id"),
    ],
)
def test_a_bad_value_is_named(changes, says):
    with pytest.raises(ValueError, match=says) as caught:
        ModelConfig.from_hf(HF | changes)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "gemma3"}, r"general.architecture='gemma3' is not supported \(supported: llama\)"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama.rope.scaling.type='yarn' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8 differs"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8 differs"),
        ({"tokenizer.ggml.eos_token_id": 4000}, "eos_token_id=4000"),
    ],
)
def test_a_bad_field_is_named(changes, says):
    with pytest.raises(ValueError, match=says):
        ModelConfig.from_gguf(GGUF | changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [("family", "gpt2"), ("rope_factors", (1.0, 2.0)), ("rope_factors", (0.0,) * 8), ("mlp_bias", 1), ("num_heads", 0)],
)
def test_a_config_checks_itself(field, value):
    config = ModelConfig.from_hf(HF)
    with pytest.raises(ValueError, match="architecture" if field == "family" else field):
        dataclasses.replace(config, **{field: value})


def test_vocabulary_size_may_come_from_the_tokens():
    fields = {key: value for key, value in GGUF.items() if key != "llama.vocab_size"}
    assert ModelConfig.from_gguf(fields | {"tokenizer.ggml.tokens": ["a"] * 77}).vocab_size == 77


def test_head_size_may_differ_from_the_even_share():
    assert ModelConfig.from_hf(HF | {"head_dim": 32}).head_dim == 32
    assert ModelConfig.from_gguf(GGUF | {"llama.attention.key_length": 32}).head_dim == 32
    assert np.isclose(ModelConfig.from_hf(HF | {"rms_norm_eps": 1}).rms_norm_eps, 1.0)
