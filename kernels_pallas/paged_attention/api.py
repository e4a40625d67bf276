"""The public operations and the choice of an implementation.

An implementation owns the layout of its pool, since the fastest one differs by platform. It is chosen once, when the
pool is allocated; writes and reads follow the pool.
"""

from dataclasses import dataclass, field
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention.interface import LOWEST, Implementation, PoolSpec, Variant

# The interpreted ones run a kernel's own code on any platform, slowly: for tests.
_NAMES = ("gpu", "gpu_interpret", "reference", "tpu", "tpu_interpret")
_IMPLEMENTATIONS: dict[str, Implementation] = {}  # those that were asked for
_OF_PLATFORM = {"tpu": "tpu", "gpu": "gpu"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """Keys and values of one layer. `arrays` are in the implementation's own layout; only this package looks inside."""

    arrays: tuple[Array, ...]
    spec: PoolSpec = field(metadata={"static": True})
    implementation: str = field(metadata={"static": True})


def check_kv_pool(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: np.typing.DTypeLike,
    implementation: str | None = None,
) -> tuple[PoolSpec, str]:
    """What a pool of these sizes is, and the name of its implementation. Allocates nothing.

    `implementation=None` picks by platform: the kernel on a TPU or a GPU, `reference` elsewhere. Raises ValueError for
    a size below 1 or a name that does not exist, and NotImplementedError, naming the shape and what is taken, if the
    implementation cannot serve the pool: it is never replaced by another in silence.
    """
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for field_name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{field_name} must be at least 1, not {size}")
    spec = PoolSpec(**sizes, dtype=jnp.dtype(dtype))
    name = _OF_PLATFORM.get(jax.default_backend(), "reference") if implementation is None else implementation
    if name not in (*_NAMES, *_IMPLEMENTATIONS):
        raise ValueError(f"the attention implementation must be one of {list(_NAMES)} or None, not {implementation!r}")
    _implementation(name).check(spec)
    return spec, name


def check_platform(implementation: str) -> None:
    """Raise ValueError if the implementation cannot run here: a kernel made for another platform than jax's default."""
    needed = {name: platform for platform, name in _OF_PLATFORM.items()}.get(implementation)
    if needed is not None and needed != jax.default_backend():
        raise ValueError(
            f"attention implementation {implementation!r} needs a {needed.upper()}, and jax runs on "
            f"{jax.default_backend()} here: choose 'reference', or '{implementation}_interpret' to try it slowly"
        )


def init_kv_pool(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: np.typing.DTypeLike,
    implementation: str | None = None,
) -> KVPool:
    """Allocate one layer's pool, `num_blocks` + 1 blocks of `block_size` positions. Raises as `check_kv_pool` does."""
    spec, name = check_kv_pool(num_blocks, block_size, num_kv_heads, head_dim, dtype, implementation)
    return KVPool(_implementation(name).init_arrays(spec), spec, name)


def write_kv(
    pool: KVPool,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    block: Int[Array, " T"],
    offset: Int[Array, " T"],
) -> KVPool:
    """Store row `t` of `k` and `v` at position `offset[t]` of block `block[t]`.

    Rows must name different places, except in the scratch block, where padding goes and any row may win. Blocks and
    offsets are not checked. Raises ValueError at trace time if shapes disagree with each other or with the pool.
    """
    spec = pool.spec
    _check_integers("write_kv", block=block, offset=offset)
    if (
        block.ndim != 1
        or k.shape != (*block.shape, spec.num_kv_heads, spec.head_dim)
        or v.shape != k.shape
        or offset.shape != block.shape
    ):
        raise ValueError(
            f"write_kv: shapes disagree: k {k.shape}, v {v.shape}, block {block.shape}, offset {offset.shape}, "
            f"a pool of {spec.num_kv_heads} heads of {spec.head_dim}"
        )
    arrays = _implementation(pool.implementation).write(spec, pool.arrays, k, v, block, offset)
    return KVPool(arrays, spec, pool.implementation)


def paged_attention(
    q: Float[Array, "N Q H D"],
    pool: KVPool,
    block_tables: Int[Array, "N M"],
    first_position: Int[Array, " N"],
    num_tokens: Int[Array, " N"],
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "N Q H D"]:
    """Causal attention of `N` query tiles over the blocks of their sequences.

    Row `r` of tile `n` is the token at position `first_position[n] + r`, and attends to positions 0 to its own; its
    keys and values are already in the pool. Rows from `num_tokens[n]` on are padding and come out as 0. A decode row is
    a tile with Q = 1. Position `p` of tile `n` is in block `block_tables[n, p // block_size]`; entries past the last
    position may name any block of the pool: what stands there, even NaN, has no influence.

    `sliding_window` W: position p attends to p - W + 1 to p only; blocks wholly before the window are not read.
    `logits_soft_cap` c: logits are c * tanh(logits / c). `sinks`: a logit for each head that takes its share of the
    softmax and gives no value (arXiv:2309.17453, as gpt-oss learns it).

    Softmax and its sums are in float32 whatever the dtypes; the result has the dtype of `q`. `H` is a multiple of
    `Hkv`; query head `h` reads key head `h // (H / Hkv)` (grouped-query attention, arXiv:2305.13245; paged,
    arXiv:2309.06180). It is made for inference: it has no derivative.
    The options are fixed at trace time. Raises ValueError at trace time if shapes disagree, an option is out of range
    or a table or length is no integer, and NotImplementedError for dtypes and tiles that a kernel does not take. What
    the tables and lengths hold is not checked.
    """
    spec = pool.spec
    _check_integers("paged_attention", block_tables=block_tables, first_position=first_position, num_tokens=num_tokens)
    lengths = {first_position.shape, num_tokens.shape}
    if q.ndim != 4 or lengths != {q.shape[:1]} or block_tables.ndim != 2 or block_tables.shape[0] != q.shape[0]:
        raise ValueError(
            f"paged_attention: shapes disagree: q {q.shape}, block_tables {block_tables.shape}, "
            f"first_position {first_position.shape}, num_tokens {num_tokens.shape}"
        )
    num_heads, head_dim = q.shape[2:]
    if num_heads % spec.num_kv_heads or head_dim != spec.head_dim:
        raise ValueError(
            f"paged_attention: q {q.shape} does not fit a pool of {spec.num_kv_heads} heads of {spec.head_dim}"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"paged_attention: sinks {sinks.shape} must be one for each of the {num_heads} heads of q")
    if block_tables.shape[1] == 0:
        raise ValueError("paged_attention: block_tables has no column, so no tile has a block")
    variant = Variant(scale, sliding_window, logits_soft_cap)
    if q.size == 0:
        return q
    if sinks is not None:  # -inf, for a head without one, would be NaN less itself
        sinks = jnp.maximum(sinks.astype(jnp.float32), LOWEST)
    return _implementation(pool.implementation).attend(
        spec,
        pool.arrays,
        q,
        block_tables.astype(jnp.int32),
        first_position.astype(jnp.int32),
        num_tokens.astype(jnp.int32),
        sinks,
        variant,
    )


def _implementation(name: str) -> Implementation:
    """Imported on first use: Pallas takes a second to import, and on a CPU nothing of it is needed."""
    if name not in _IMPLEMENTATIONS:
        kind, _, interpret = name.partition("_")
        module = import_module(f"kernels_pallas.paged_attention.{kind}")
        is_reference = kind == "reference"
        made = module.Reference() if is_reference else getattr(module, kind.upper())(interpret=bool(interpret))
        _IMPLEMENTATIONS[name] = made
    return _IMPLEMENTATIONS[name]


def _check_integers(function: str, **arrays: Array) -> None:
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{function}: {name} must be integers, not {array.dtype}")
