"""Flax NNX models that leave the memory of attention to the engine."""

from jaxpaged.models.attend import causal_attend
from jaxpaged.models.build import abstract_model, from_params, param_shapes, random_model
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Attend
from jaxpaged.models.llama import Llama

__all__ = [
    "Attend",
    "Llama",
    "ModelConfig",
    "abstract_model",
    "causal_attend",
    "from_params",
    "param_shapes",
    "random_model",
]
