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
