"""The public operations and the choice of an implementation.

An implementation owns the layout of its pool, since the fastest one differs by platform. It is chosen once, when the
pool is allocated; writes and reads follow the pool. Each implementation is a module with the same three functions.
"""

from dataclasses import dataclass, field
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention import reference

_IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """Keys and values of one layer: `num_blocks` blocks and one scratch block behind them, at index `num_blocks`.

    `arrays` are in the implementation's own layout; only this package looks inside.
    """

    arrays: tuple[Array, ...]
    implementation: str = field(metadata={"static": True})


def init_kv_pool(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    implementation: str | None = None,
) -> KVPool:
    """Allocate one layer's pool of `num_blocks` + 1 blocks of `block_size` positions.

    `implementation=None` picks by platform. Raises ValueError for a name that does not exist; a named implementation
    is never replaced by another.
    """
    name = "reference" if implementation is None else implementation
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {sorted(_IMPLEMENTATIONS)} or None, not {implementation!r}")
    arrays = _IMPLEMENTATIONS[name].init_arrays(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    return KVPool(arrays, name)


def write_kv(
    pool: KVPool,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    block: Int[Array, " T"],
    offset: Int[Array, " T"],
) -> KVPool:
    """Store row `t` of `k` and `v` at position `offset[t]` of block `block[t]`.

    Rows must name different places, except in the scratch block, where padding goes and any row may win.
    Raises ValueError at trace time if the shapes disagree.
    """
    if k.shape != v.shape or block.shape != k.shape[:1] or offset.shape != k.shape[:1]:
        raise ValueError(
            f"write_kv: shapes disagree: k {k.shape}, v {v.shape}, block {block.shape}, offset {offset.shape}"
        )
    arrays = _IMPLEMENTATIONS[pool.implementation].write(pool.arrays, k, v, block, offset)
    return KVPool(arrays, pool.implementation)


def paged_attention(
    q: Float[Array, "N Q H D"],
    pool: KVPool,
    block_tables: Int[Array, "N M"],
    first_position: Int[Array, " N"],
    num_tokens: Int[Array, " N"],
    *,
    scale: float,
) -> Float[Array, "N Q H D"]:
    """Causal attention of `N` query tiles over the blocks of their sequences.

    Row `r` of tile `n` is the token at position `first_position[n] + r`, and attends to positions 0 to its own; its
    keys and values are already in the pool. Rows from `num_tokens[n]` on are padding and come out as 0. A decode row is
    a tile with Q = 1. Position `p` of tile `n` is in block `block_tables[n, p // block_size]`; entries past the last
    position may name any block of the pool: what stands there, even NaN, has no influence.

    Softmax and its sums are in float32 whatever the dtypes; the result has the dtype of `q`. `H` is a multiple of
    `Hkv`; query head `h` reads key head `h // (H / Hkv)` (grouped-query attention, arXiv:2305.13245; paged,
    arXiv:2309.06180).
    Raises ValueError at trace time if the shapes disagree.
    """
    n = q.shape[0]
    if q.ndim != 4 or block_tables.ndim != 2 or {x.shape[0] for x in (block_tables, first_position, num_tokens)} != {n}:
        raise ValueError(
            f"paged_attention: shapes disagree: q {q.shape}, block_tables {block_tables.shape}, "
            f"first_position {first_position.shape}, num_tokens {num_tokens.shape}"
        )
    module = _IMPLEMENTATIONS[pool.implementation]
    return module.attend(q, pool.arrays, block_tables, first_position, num_tokens, scale=scale)
