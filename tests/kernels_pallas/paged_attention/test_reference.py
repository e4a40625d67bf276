import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import init_kv_pool
from tests.kernels_pallas.paged_attention.suite import PagedAttentionSuite


class TestReference(PagedAttentionSuite):
    implementation = "reference"
    block_sizes = (1, 4, 16, 256)
    head_dims = (8, 64)


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        init_kv_pool(1, 4, 1, 8, jnp.dtype("float32"), implementation="fastest")


@pytest.mark.parametrize("dtype", ["int8", "bool", "float64", "complex64"])
def test_pools_that_hold_no_keys(dtype: str) -> None:
    with pytest.raises(
        NotImplementedError, match=f"pools of {dtype} are not taken, only of bfloat16, float16, float32"
    ):
        init_kv_pool(1, 4, 1, 8, jnp.dtype(dtype), "reference")


@pytest.mark.parametrize("size", ["num_blocks", "block_size", "num_kv_heads", "head_dim"])
def test_sizes_below_one(size: str) -> None:
    sizes = {"num_blocks": 1, "block_size": 16, "num_kv_heads": 1, "head_dim": 64} | {size: 0}
    with pytest.raises(ValueError, match=f"{size} must be at least 1, not 0"):
        init_kv_pool(**sizes, dtype="float32")
