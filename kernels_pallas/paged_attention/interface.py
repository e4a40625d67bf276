"""What the implementations share: what a pool is, which attention is asked for, and the functions each provides."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# What the kernels take.
HEAD_DIMS = (64, 96, 128, 256)
DTYPES = ("bfloat16", "float32")
# What a running maximum begins with. Finite, so that a row without any key yet gives exp(-inf - LOWEST) = 0 and not
# exp(-inf + inf) = NaN.
LOWEST = -1e30


@dataclass(frozen=True)
class PoolSpec:
    """What one layer's pool holds: `num_blocks` blocks, and one scratch block behind them, at index `num_blocks`."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype


@dataclass(frozen=True)
class Variant:
    """Which attention: the static options of a layer. The same lines run in every implementation, kernels included.

    scale: multiplies the products of queries and keys.
    sliding_window: a token sees that many positions, its own included (Mistral, arXiv:2310.06825); None: all.
    logits_soft_cap: logits become cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118); None: as they are.
    """

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is out of range, or not known at trace time."""
        window, cap = self.sliding_window, self.logits_soft_cap
        if not _is_number(self.scale):
            raise ValueError(f"scale must be a finite number, known at trace time, not {self.scale!r}")
        if window is not None and not (_is_number(window) and window == int(window) and 1 <= window < 2**31):
            raise ValueError(f"sliding_window must be None or an integer from 1 to 2**31 - 1, not {window!r}")
        if cap is not None and not (_is_number(cap) and cap > 0):
            raise ValueError(f"logits_soft_cap must be None or a finite number above 0, not {cap!r}")

    def logits(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        logits = products * self.scale
        if self.logits_soft_cap is None:
            return logits
        return self.logits_soft_cap * jnp.tanh(logits / self.logits_soft_cap)

    def sees(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether the token at position `query` attends to the one at position `key`. At a negative one: to none."""
        causal = key <= query
        return causal if self.sliding_window is None else causal & (key > query - self.sliding_window)

    def first_key(self, query: Int[Array, "..."]) -> Int[Array, "..."]:
        """The lowest position that the token at position `query`, or one after it, attends to."""
        if self.sliding_window is None:
            return jnp.zeros_like(query)
        return jnp.maximum(query - self.sliding_window + 1, 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def check_dtype(dtype: np.dtype, what: str, taken: tuple[str, ...]) -> None:
    """Raise NotImplementedError if `dtype` is none of those `taken`."""
    if dtype.name not in taken:
        raise NotImplementedError(f"{what} of {dtype.name} are not taken, only of {', '.join(taken)}")


class Implementation(Protocol):
    """One way to store a pool and to attend over it. Only the implementation looks inside `arrays`.

    A quantised pool, when it comes, keeps its scales as one more of the arrays.
    """

    def check(self, spec: PoolSpec) -> None:
        """Raise NotImplementedError, naming the shape and what is taken, for a pool that it cannot serve."""

    def init_arrays(self, spec: PoolSpec) -> tuple[Array, ...]: ...

    def write(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        block: Int[Array, " T"],
        offset: Int[Array, " T"],
    ) -> tuple[Array, ...]: ...

    def attend(
        self,
        spec: PoolSpec,
        arrays: tuple[Array, ...],
        q: Float[Array, "N Q H D"],
        block_tables: Int[Array, "N M"],
        first_position: Int[Array, " N"],
        num_tokens: Int[Array, " N"],
        sinks: Float[Array, " H"] | None,
        variant: Variant,
    ) -> Float[Array, "N Q H D"]: ...
