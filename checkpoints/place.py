"""Place the tensors of a checkpoint in a model: each exactly once, a few at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from checkpoints.files import StoredTensor
from checkpoints.rules import Rule, Table
from jaxpaged.models import Llama, ModelConfig, from_params, param_shapes
from jaxpaged.models.build import ParamPath

_TENSORS_AT_ONCE = 4


@dataclass(frozen=True)
class Placement:
    """Which stored tensor becomes which parameter, by which rule."""

    config: ModelConfig
    dtype: DTypeLike
    chosen: Mapping[ParamPath, tuple[StoredTensor, Rule]]

    def load(self) -> Llama:
        """The model with the checkpoint's values. Few tensors are held twice at any time, never the model.

        Raises ValueError naming a tensor whose values are not finite.
        """

        def load(target: ParamPath) -> jax.Array:
            return _load(self.config, *self.chosen[target], target, self.dtype)

        # numpy works outside of Python's lock.
        with ThreadPoolExecutor(_TENSORS_AT_ONCE) as pool:
            params = dict(zip(self.chosen, pool.map(load, self.chosen), strict=True))
        return from_params(self.config, self.dtype, params)


def plan(
    path: Path, config: ModelConfig, table: Table, tensors: Mapping[str, StoredTensor], dtype: DTypeLike
) -> Placement:
    """Find each parameter's tensor, and check every name and shape. `path` is what errors call the checkpoint.

    Raises ValueError naming the tensors that are missing, left over or misshaped.
    """
    layers = config.num_layers
    if layers > len(tensors):  # also bounds the work on a corrupt configuration
        raise ValueError(f"{path}: {layers} layers are configured, the weights are only {len(tensors)} tensors")
    shapes = param_shapes(config, dtype)
    tensors = _without_tied_head(config, table, tensors)
    rules = {target: table.find(target) for target in shapes}
    _check_names(path, table, tensors, [key for key, _ in rules.values()])
    chosen = {target: (tensors[key], rule) for target, (key, rule) in rules.items()}
    _check_shapes([(tensor, _stored_shape(target, shapes[target].shape)) for target, (tensor, _) in chosen.items()])
    return Placement(config, dtype, chosen)


def _check_names(path: Path, table: Table, tensors: Mapping[str, StoredTensor], needed: Sequence[str]) -> None:
    missing = [repr(key) for key in needed if key not in tensors]
    if missing:
        raise ValueError(f"{path}: missing tensors: {_first(missing)}")
    known = set(needed)
    left_over = [repr(key) for key in tensors if key not in known and not re.fullmatch(table.ignored, key)]
    if left_over:
        raise ValueError(f"{path}: tensors that this model has no place for: {_first(left_over)}")


def _check_shapes(needed: Sequence[tuple[StoredTensor, tuple[int, ...]]]) -> None:
    wrong = [(tensor, shape) for tensor, shape in needed if tensor.shape != shape]
    if wrong:
        shown = _first([f"{tensor.name!r} {tensor.shape}, not {shape}" for tensor, shape in wrong])
        raise ValueError(f"{wrong[0][0].file}: tensors of another shape than the configuration needs: {shown}")


def _stored_shape(target: ParamPath, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Checkpoints store linear layers as [out, in], the model as [in, out]."""
    return shape[::-1] if target[-1] == "kernel" else shape


def _load(config: ModelConfig, tensor: StoredTensor, rule: Rule, target: ParamPath, dtype: DTypeLike) -> jax.Array:
    values = tensor.read()
    if rule.interleaved_heads is not None:
        values = _split_halves(values, getattr(config, rule.interleaved_heads))
    if target[-1] == "kernel":
        values = values.T
    # A copy of our own: the device array may take it over, and must not alias the mapped file.
    values = np.array(values, dtype, order="C")
    if not np.isfinite(values).all():
        raise ValueError(f"{tensor.file}: tensor {tensor.name!r}: holds values that are not finite; corrupt?")
    return jax.device_put(values)


def _split_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (2i, 2i + 1) of each head -> rows (i, i + head_dim / 2)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _without_tied_head(
    config: ModelConfig, table: Table, tensors: Mapping[str, StoredTensor]
) -> Mapping[str, StoredTensor]:
    """Leave out a stored head that the configuration ties to the embedding, after a look whether it is the same."""
    head, embedding = tensors.get(table.tied_head), tensors.get(table.tied_embedding)
    if not config.tie_word_embeddings or head is None or embedding is None:
        return tensors
    if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        raise ValueError(
            f"{head.file}: tensor {head.name!r} differs from {embedding.name!r}, but the configuration ties them"
        )
    return {name: tensor for name, tensor in tensors.items() if name != table.tied_head}


def _first(items: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(f"{item:.160}" for item in items[:most])
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")
