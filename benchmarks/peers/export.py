"""`python -m benchmarks.peers.export FOLDER [--model MODEL]`: a model as a folder in Hugging Face layout, in float32.

So all engines that want a folder have the same weights: those of a quantized file, dequantized once. An engine that
computes in bfloat16 rounds them itself.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import checkpoints
from checkpoints.rules import HF_TABLES
from jaxpaged.generate import DEFAULT_MODEL
from jaxpaged.models import Llama, ModelConfig
from jaxpaged.tokenizer import load_tokenizer


def export(model: str | Path, folder: Path) -> None:
    """Write config.json, model.safetensors and, if there is one, the tokenizer. Raises what `checkpoints.load` does."""
    path = checkpoints.resolve(model)
    config, module = checkpoints.load(path, np.float32)
    tokenizer = load_tokenizer(path)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        tokenizer.save_pretrained(folder)
    save_file(_tensors(config, module), folder / "model.safetensors", metadata={"format": "pt"})
    # Last, so that a folder with it is whole.
    (folder / "config.json").write_text(json.dumps(_hf_config(config), indent=1) + "\n")


def _tensors(config: ModelConfig, module: Llama) -> dict[str, np.ndarray]:
    table = HF_TABLES[config.family]
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        values = np.asarray(leaf[...])
        key, _ = table.find(path)
        tensors[key] = np.ascontiguousarray(values.T if path[-1] == "kernel" else values)
    return tensors


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    if config.rope_factors is not None:
        raise ValueError("a model with scaled rotary positions cannot be exported")
    eos = config.eos_token_ids
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.family,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        # Under the older key and the newer one: the peers read either.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.export", description="Write a model as a folder of float32 weights."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a folder, .gguf file or packaged model (%(default)s)")
    args = parser.parse_args(argv)
    try:
        export(args.model, args.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
