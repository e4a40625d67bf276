"""Attention shapes of real models, by name: what the kernels are compiled for, tested with, and measured on."""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Shape:
    """One layer's attention, from a model's published configuration. Of mixed layers, the one with the window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False


SHAPES = MappingProxyType(
    {
        "smollm2-135m": Shape(9, 3, 64),
        "qwen2.5-0.5b": Shape(14, 2, 64),
        "qwen3-0.6b": Shape(16, 8, 128),
        "llama-2-7b": Shape(32, 32, 128),
        "llama-3.1-8b": Shape(32, 8, 128),
        "mistral-7b": Shape(32, 8, 128, sliding_window=4096),
        "phi-3-mini": Shape(32, 32, 96, sliding_window=2047),
        "gemma-2-9b": Shape(16, 8, 256, sliding_window=4096, logits_soft_cap=50.0),
        "gemma-3-270m": Shape(4, 1, 256, sliding_window=512),
        "gpt-oss-20b": Shape(64, 8, 64, sliding_window=128, sinks=True),
    }
)
