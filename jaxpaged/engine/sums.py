"""Sums along the candidates of a step, as comparisons of all with all.

The candidates are few, some hundreds at most. A scan along them would be a kernel of its own on an accelerator, with
copies around it; a comparison is fused with what comes before and after.
"""

import operator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def cumsums(*columns: Int32[Array, " S"] | Bool[Array, " S"]) -> tuple[Int32[Array, " S"], ...]:
    """Of each column, each entry's sum with all before it. Together they are one reduction."""
    i = jnp.arange(columns[0].shape[0])
    seen = [jnp.where(i <= i[:, None], column, jnp.zeros((), column.dtype)).astype(jnp.int32) for column in columns]
    add = partial(jax.tree.map, operator.add)
    sums: tuple[Array, ...] = jax.lax.reduce(tuple(seen), tuple(jnp.int32(0) for _ in seen), add, dimensions=(1,))
    return sums


def cumsum(values: Int32[Array, " S"] | Bool[Array, " S"]) -> Int32[Array, " S"]:
    """Each entry's sum with all before it."""
    (sums,) = cumsums(values)
    return sums


def exclusive_cumsum(values: Int32[Array, " S"] | Bool[Array, " S"]) -> Int32[Array, " S"]:
    """The sum of all before each entry."""
    return cumsum(values) - values


def pick(at: Bool[Array, "N S"], values: Int32[Array, " S"]) -> Int32[Array, " N"]:
    """For each row of `at` the value where it holds, which is in one place at most; 0 where in none."""
    return jnp.sum(jnp.where(at, values, 0), axis=1, dtype=jnp.int32)
