"""A model in the layout of Hugging Face: a folder with config.json and one or more safetensors files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from checkpoints import safetensors_file
from checkpoints.files import StoredTensor, read_json
from jaxpaged.models import ModelConfig
from jaxpaged.models.fields import Fields

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> ModelConfig:
    """The configuration, with the EOS ids of config.json and generation_config.json together."""
    path = folder / "config.json"
    try:
        config = ModelConfig.from_hf(read_json(path))
        path = folder / "generation_config.json"
        if not path.exists():
            return config
        also_stops = Fields(read_json(path)).token_ids("eos_token_id")
        return dataclasses.replace(config, eos_token_ids=tuple(sorted({*config.eos_token_ids, *also_stops})))
    except ValueError as error:
        raise _naming(path, error) from error


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors by name. Raises ValueError naming the file where they are missing, double or not as indexed."""
    if (folder / WEIGHTS).exists():
        return safetensors_file.read(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder}: {_no_weights(folder)}")
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{folder / INDEX}: weight_map is missing or empty")
    tensors: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(index.values()):
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX}: {shard!r:.120} is not the name of a safetensors file in the folder")
        for name, tensor in safetensors_file.read(folder / shard).items():
            if index.get(name) != shard:
                raise ValueError(f"{folder / shard}: tensor {name!r:.120}: {INDEX} does not say that it is here")
            tensors[name] = tensor
    for name, shard in index.items():
        if name not in tensors:
            raise ValueError(f"{folder / shard}: tensor {name!r:.120} is missing, {INDEX} says that it is here")
    return tensors


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return "holds only pickled weights, which are never loaded: convert them to safetensors"
    if any(folder.glob("*.gguf")):
        return "holds no safetensors weights; to load a .gguf file, give the path of the file itself"
    return f"holds no weights ({WEIGHTS} or {INDEX})"


def _naming(path: Path, error: ValueError) -> ValueError:
    return error if str(error).startswith(str(path)) else ValueError(f"{path}: {error}")
