"""Write small checkpoints for the tests, with the formats' own writers and names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxpaged.models.rope import factors_from_hf

GOLDEN = Path(__file__).parents[1] / "golden"

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def golden_folder(variant: str) -> tuple[dict, dict[str, np.ndarray]]:
    """The config.json and the tensors of a tiny golden Llama."""
    folder = GOLDEN / f"llama_{variant}"
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def smallest() -> tuple[dict, dict[str, np.ndarray]]:
    """A config.json and tensors of about 5 KB, tied."""
    config = dict(
        model_type="llama", vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-5, max_position_embeddings=32,
        tie_word_embeddings=True, eos_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (11, 8),
        "model.norm.weight": (8,),
        layer + "input_layernorm.weight": (8,),
        layer + "post_attention_layernorm.weight": (8,),
        layer + "self_attn.q_proj.weight": (8, 8),
        layer + "self_attn.k_proj.weight": (4, 8),
        layer + "self_attn.v_proj.weight": (4, 8),
        layer + "self_attn.o_proj.weight": (8, 8),
        layer + "mlp.gate_proj.weight": (12, 8),
        layer + "mlp.up_proj.weight": (12, 8),
        layer + "mlp.down_proj.weight": (8, 12),
    }
    rng = np.random.default_rng(0)
    return config, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, config: Mapping, tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """config.json and one safetensors file, or that many and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    index = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(index.values()):
        save_file({name: tensors[name] for name, file in index.items() if file == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def to_gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"
    return f"{GGUF_NAMES[module]}.{kind}"


def write_gguf(
    path: Path, config: Mapping, tensors: Mapping[str, np.ndarray], kind: gguf.GGMLQuantizationType, extra: Mapping = {}
) -> dict[str, np.ndarray]:
    """A GGUF of a folder's content, matrices stored as `kind` where their rows are whole blocks, else as F32.

    Returns the f32 values that a reader should find, under the names and in the row order of the folder.
    """
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    writer.add_eos_token_id(2)
    if rope["rope_type"] == "llama3":
        factors = np.array(factors_from_hf(rope, head_dim, rope["rope_theta"]), np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    values = {}
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, tensor in {**tensors, **extra}.items():
        stored_kind = kind if tensor.ndim == 2 and tensor.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F32
        raw = gguf.quantize(tensor, stored_kind)
        values[name] = gguf.dequantize(raw, stored_kind).reshape(tensor.shape)
        # A GGUF holds the rotary pairs of a Llama's queries and keys side by side. Rows are quantized one by one.
        for projection, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if projection in name:
                raw = raw.reshape(count, 2, head_dim // 2, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape)
        writer.add_tensor(name if name in extra else to_gguf_name(name), raw, raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values
