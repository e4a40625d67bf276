"""What the CPU can do, and how XLA is told to make use of it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

_FEW_ROWS = 16


def cpu_features() -> frozenset[str]:
    """The names that Linux gives to the instructions of this CPU; none where they are not known."""
    cpuinfo = Path("/proc/cpuinfo")
    return frozenset(cpuinfo.read_text().split()) if cpuinfo.exists() else frozenset()


def compiler_options(dtype: np.typing.DTypeLike, max_num_seqs: int) -> dict[str, str] | None:
    """Options of XLA for an engine with weights of `dtype` that decodes up to `max_num_seqs` rows; None: its own.

    Without AVX-512, XLA's newer library (YNNPACK) takes 1.6 times as long as its older one (Eigen) for float32 products
    of 2 to 16 rows, and as long for more; but the small products of attention it does better. So with few rows it is
    turned off for products. With AVX-512 it is 8 % faster for 8 rows and no faster for one. A program without it is
    read from the cache on disk in two thirds of the time, so for one row it is turned off there, too.
    """
    if jax.default_backend() != "cpu" or jnp.dtype(dtype) != jnp.float32 or jax.__version_info__ < (0, 12):
        return None
    features = cpu_features()
    if not features or max_num_seqs > (1 if "avx512f" in features else _FEW_ROWS):
        return None
    # The types of operations that are left to it: all but products.
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"}
