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
    head_dim: int
    lanes: int
    key: slice
    value: slice

    @classmethod
    def of(cls, head_dim: int) -> "HeadGroup":
        if head_dim % _LANES == 0:
            return cls(1, head_dim, 2 * head_dim, slice(0, head_dim), slice(head_dim, 2 * head_dim))
        heads = next(n for n in range(1, _LANES) if n * 2 * head_dim % _LANES == 0)
        lanes = heads * 2 * head_dim
        return cls(heads, head_dim, lanes, slice(0, lanes), slice(0, lanes))

    @property
    def is_split(self) -> bool:
        """Keys and values have lanes of their own."""
        return self.key != self.value

    @property
    def moved_lanes(self) -> int:
        """Of queries and results outside the kernel. One head's are padded and cut inside, where that moves nothing."""
        return self.head_dim if self.heads == 1 else self.lanes

    def padded(self, q: Float[Array, "R moved"]) -> Float[Array, "R key"]:
        """Inside the kernel: the queries at the lanes of their keys."""
        return q if q.shape[-1] == self.key.stop else jnp.concatenate([q, jnp.zeros_like(q)], axis=-1)

    def cut(self, out: Float[Array, "Hg R value"]) -> Float[Array, "Hg R moved"]:
        """Inside the kernel: the lanes of the values."""
        return out if out.shape[-1] == self.moved_lanes else out[..., self.head_dim :]


def in_groups(q: Float[Array, "N Q H D"], num_kv_heads: int, group: HeadGroup) -> Float[Array, "N Hg R moved"]:
    """Rows of a head group are its query heads' tokens, head by head."""
    n, rows, _, d = q.shape
    heads = num_kv_heads // group.heads
    q = q.reshape(n, rows, heads, group.heads, -1, d).transpose(0, 2, 3, 4, 1, 5)  # N Hg heads G Q D
    if group.heads > 1:
        own = jnp.eye(group.heads, dtype=bool)[:, None, None, :, None]
        q = jnp.where(own, q[..., None, :], 0)  # N Hg heads G Q heads D
        q = jnp.pad(q, ((0, 0),) * 6 + ((0, d),))
    return q.reshape(n, heads, -1, group.moved_lanes)


def from_groups(
    out: Float[Array, "N Hg R moved"], num_kv_heads: int, rows: int, group: HeadGroup
) -> Float[Array, "N Q H D"]:
    n, d = out.shape[0], group.head_dim
    if group.heads > 1:
        out = out.reshape(n, num_kv_heads // group.heads, group.heads, -1, rows, group.lanes)
        values = [out[:, :, i, ..., (2 * i + 1) * d : (2 * i + 2) * d] for i in range(group.heads)]
        out = jnp.stack(values, axis=2)
    return out.reshape(n, num_kv_heads, -1, rows, d).transpose(0, 3, 1, 2, 4).reshape(n, rows, -1, d)
