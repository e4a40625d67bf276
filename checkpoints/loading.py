"""Load a model from a folder in Hugging Face layout or from a .gguf file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from checkpoints import folder, gguf_file
from checkpoints.files import StoredTensor
from checkpoints.place import Placement, plan
from checkpoints.rules import GGUF_TABLES, HF_TABLES
from jaxpaged.models import Llama, ModelConfig

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration is read. `gguf`: the file, if it is one; else `path` is a folder."""

    path: Path
    config: ModelConfig
    gguf: gguf_file.GGUFFile | None

    def plan(self, dtype: DTypeLike = np.float32) -> Placement:
        """Find each parameter's tensor; `load()` of what it returns reads them.

        Weights become `dtype` (float32 or bfloat16); quantized ones are dequantized. Every tensor is placed exactly
        once. Raises ValueError, naming the file and where there is one the tensor, for anything missing, left over,
        misshaped, truncated or not supported.
        """
        if jnp.dtype(dtype).name not in DTYPES:
            raise ValueError(f"dtype={jnp.dtype(dtype).name} is not supported (supported: {', '.join(DTYPES)})")
        tables = GGUF_TABLES if self.gguf else HF_TABLES
        tensors = self.gguf.tensors if self.gguf else folder.read_tensors(self.path)
        return plan(self.path, self.config, tables[self.config.family], tensors, dtype)

    def load(self, dtype: DTypeLike = np.float32) -> Llama:
        """The model. Raises what `plan` and `Placement.load` raise."""
        return self.plan(dtype).load()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in a folder (config.json and safetensors) or a .gguf file, its weights not read yet.

    Raises FileNotFoundError for a path that does not exist, and ValueError, naming the file, for a configuration that
    is missing, corrupt or not supported.
    """
    path = Path(path)
    if _is_folder(path):
        return Checkpoint(path, folder.read_config(path), None)
    file = gguf_file.read(path)
    return Checkpoint(path, _gguf_config(file), file)


def load(path: str | Path, dtype: DTypeLike = np.float32) -> tuple[ModelConfig, Llama]:
    """The configuration and the model. Raises what `open_checkpoint` and `Checkpoint.load` raise."""
    checkpoint = open_checkpoint(path)
    return checkpoint.config, checkpoint.load(dtype)


def read_config(path: str | Path) -> ModelConfig:
    """The configuration alone. Raises what `open_checkpoint` raises."""
    return open_checkpoint(path).config


def _is_folder(path: Path) -> bool:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        return True
    if path.suffix in (".safetensors", ".json"):
        raise ValueError(f"{path}: give the folder that holds it, with config.json, or a .gguf file")
    return False


def _gguf_config(file: gguf_file.GGUFFile) -> ModelConfig:
    try:
        config = ModelConfig.from_gguf(file.fields, file.tensors)
        factors = file.tensors.get("rope_freqs.weight")
        return config if factors is None else dataclasses.replace(config, rope_factors=_rope_factors(factors))
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _rope_factors(tensor: StoredTensor) -> tuple[float, ...]:
    if len(tensor.shape) != 1:
        raise ValueError(f"tensor {tensor.name!r}: shape {list(tensor.shape)}, expected one dimension")
    return tuple(tensor.read().astype(np.float64).tolist())
