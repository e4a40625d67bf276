"""The whole run loop of real models' shapes, as abstract arrays: nothing is allocated, so any size can be compiled."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models import LLAMA_3_1_8B, QWEN3_0_6B
from benchmarks.topology import Program, compile_for
from jaxpaged.engine.config import Bucket, EngineConfig
from jaxpaged.engine.events import Events, init_events
from jaxpaged.engine.run import compile_run
from jaxpaged.engine.state import EngineState, init_state
from jaxpaged.engine.step import forward_and_sample_of, step
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Llama

MODELS: Mapping[str, ModelConfig] = MappingProxyType({"qwen3-0.6b": QWEN3_0_6B, "llama-3.1-8b": LLAMA_3_1_8B})


def engine_config(*, block_size: int, pool_tokens: int = 65_536) -> EngineConfig:
    """A server's usual sizes: 64 sequences of up to 4,096 tokens, 512 tokens a step."""
    return EngineConfig(
        num_blocks=pool_tokens // block_size,
        block_size=block_size,
        max_num_seqs=64,
        max_num_waiting=256,
        max_num_batched_tokens=512,
        max_model_len=4096,
    )


@dataclass(frozen=True, kw_only=True)
class OneBucket(EngineConfig):
    """An engine whose every step takes its `which`-th bucket, counted from 1. There to be compiled, not to serve."""

    which: int

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return super().buckets[self.which - 1 : self.which]


def one_bucket_each(config: EngineConfig) -> list[OneBucket]:
    return [OneBucket(**vars(config), which=i + 1) for i in range(len(config.buckets))]


@dataclass(frozen=True)
class Loop:
    """The arguments of `run`, as shapes, and the model's structure."""

    graphdef: nnx.GraphDef[Any]
    config: EngineConfig
    params: Any
    state: Any

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig, implementation: str = "tpu") -> "Loop":
        dtype = jnp.bfloat16
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Llama(model, dtype=dtype)))
        state = jax.eval_shape(
            lambda: init_state(config, model.num_layers, model.num_kv_heads, model.head_dim, dtype, implementation)
        )
        return cls(graphdef, config, params, state)

    def compile(self, chip: str) -> Program:
        """The whole loop, as the engine compiles it."""
        run = compile_run(self.graphdef, self.config)
        return compile_for(chip, run, self.params, self.state, jax.ShapeDtypeStruct((), jnp.int32))

    def compile_step(self, chip: str) -> Program:
        """One step alone, with the state and the events donated."""

        def one_step(params: nnx.State, state: EngineState, events: Events) -> tuple[EngineState, Events]:
            model = nnx.merge(self.graphdef, params)
            return step(forward_and_sample_of(model, self.config), state, events, self.config)

        events = jax.eval_shape(lambda: init_events(self.config))
        return compile_for(chip, one_step, self.params, self.state, events, donate=(1, 2))
