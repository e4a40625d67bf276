"""Make a model without weights to look at, from given weights, or with random ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Llama

ParamPath = tuple[Any, ...]
"""Attribute names and list indices from the model to one parameter: ("layers", 0, "mlp", "up", "kernel")."""


def param_shapes(config: ModelConfig, dtype: DTypeLike) -> dict[ParamPath, jax.ShapeDtypeStruct]:
    """Path, shape and dtype of every parameter, in the order of the model. Allocates nothing."""
    _, state = nnx.split(abstract_model(config, dtype))
    return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in nnx.to_flat_state(state)}


def from_params(config: ModelConfig, dtype: DTypeLike, params: Mapping[ParamPath, jax.Array]) -> Llama:
    """The model with these parameters. Raises ValueError when they are not those of `param_shapes`."""
    graphdef, state = nnx.split(abstract_model(config, dtype))
    leaves = nnx.to_flat_state(state)
    wanted = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves}
    given = {path: (value.shape, value.dtype) for path, value in params.items()}
    if wanted != given:
        wrong = sorted(".".join(map(str, path)) for path, _ in wanted.items() ^ given.items())
        raise ValueError(f"these parameters are missing, too many or of another shape or dtype: {', '.join(wrong[:5])}")
    filled = [(path, leaf.replace(params[path])) for path, leaf in leaves]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def random_model(config: ModelConfig, seed: int = 0, dtype: DTypeLike = np.float32) -> Llama:
    """A model whose every tensor is random, norms and biases too, and whose activations stay of order 1."""
    rng = np.random.default_rng(seed)

    def draw(path: ParamPath, shape: tuple[int, ...]) -> jax.Array:
        values = rng.standard_normal(shape)
        if path[-1] == "scale":
            values = 1 + values / 4
        elif path[-1] == "kernel":
            values /= np.sqrt(shape[0])
        elif path[-1] == "bias":
            values /= 4
        return jax.numpy.asarray(values, dtype)

    shapes = param_shapes(config, dtype)
    return from_params(config, dtype, {path: draw(path, leaf.shape) for path, leaf in shapes.items()})


def abstract_model(config: ModelConfig, dtype: DTypeLike) -> Llama:
    """The model with shapes in place of parameters. Allocates nothing."""
    return nnx.eval_shape(lambda: Llama(config, dtype=dtype))
