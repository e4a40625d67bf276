"""The whole run loop of real models' shapes lowers for CUDA, where no GPU is, with the GPU's kernels inside."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from benchmarks.loops import MODELS, Loop, engine_config
from jaxpaged.engine.run import compile_run
from tests.kernels_pallas.paged_attention.test_cuda_lowering import H100, kernels


@pytest.mark.parametrize("name", MODELS)
def test_the_loop_lowers_for_cuda(name: str) -> None:
    loop = Loop.of(MODELS[name], engine_config(block_size=16), "gpu")
    run = compile_run(loop.graphdef, loop.config)
    mesh = AbstractMesh((1,), ("x",), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # jax 0.12 deprecates the backend (docs/architecture.md).
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        traced = run.trace(loop.params, loop.state, jax.ShapeDtypeStruct((), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # One for the decode tiles and one for the prefill tiles, in each bucket and layer that has them.
    calls = sum((bucket.decode_tiles > 0) + (bucket.prefill_tiles > 0) for bucket in loop.config.buckets)
    assert kernels(text).count("paged_attention") == MODELS[name].num_layers * calls
