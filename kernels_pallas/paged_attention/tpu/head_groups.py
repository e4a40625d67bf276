"""Key heads that the matrix unit multiplies at once, and how queries and results are laid out for it.

head_dim 64 has key and value in the same 128 lanes, head_dim 96 two heads in 384, and a slice of lanes at another
multiple than 128 costs a rotation of every register. There, queries are padded with zeros to the lanes of a whole
*head group*: their product with it is that with the keys, and of the weights' product with it the lanes of the values
are taken. The matrix unit works in squares of 128 anyway.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

_LANES = 128


@dataclass(frozen=True)
class HeadGroup:
    """Key heads that are multiplied at once. lanes: of the pool; key, value: the lanes of it that the products take."""

    heads: int
    lanes: int
    key: slice
    value: slice

    @classmethod
    def of(cls, head_dim: int) -> "HeadGroup":
        if head_dim % _LANES == 0:
            return cls(1, 2 * head_dim, slice(0, head_dim), slice(head_dim, 2 * head_dim))
        heads = next(n for n in range(1, _LANES) if n * 2 * head_dim % _LANES == 0)
        lanes = heads * 2 * head_dim
        return cls(heads, lanes, slice(0, lanes), slice(0, lanes))

    @property
    def is_split(self) -> bool:
        """Keys and values have lanes of their own."""
        return self.key != self.value


def in_groups(q: Float[Array, "N Q H D"], num_kv_heads: int, group: HeadGroup) -> Float[Array, "N Hg R L"]:
    """Rows of a head group are its query heads' tokens, head by head; each stands at the lanes of its key."""
    n, rows, _, d = q.shape
    heads = num_kv_heads // group.heads
    q = q.reshape(n, rows, heads, group.heads, -1, d).transpose(0, 2, 3, 4, 1, 5)  # N Hg heads G Q D
    if not group.is_split:
        own = jnp.eye(group.heads, dtype=bool)[:, None, None, :, None]
        q = jnp.where(own, q[..., None, :], 0)  # N Hg heads G Q heads D
        q = jnp.pad(q, ((0, 0),) * 6 + ((0, d),))
    return q.reshape(n, heads, -1, group.key.stop)


def from_groups(
    out: Float[Array, "N Hg R L"], num_kv_heads: int, head_dim: int, rows: int, group: HeadGroup
) -> Float[Array, "N Q H D"]:
    n, d = out.shape[0], head_dim
    if group.is_split:
        out = out.reshape(n, num_kv_heads, -1, rows, d)
    else:
        out = out.reshape(n, num_kv_heads // group.heads, group.heads, -1, rows, group.lanes)
        values = [out[:, :, i, ..., (2 * i + 1) * d : (2 * i + 2) * d] for i in range(group.heads)]
        out = jnp.stack(values, axis=2).reshape(n, num_kv_heads, -1, rows, d)
    return out.transpose(0, 3, 1, 2, 4).reshape(n, rows, -1, d)
