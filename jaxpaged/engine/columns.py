"""Tables of named columns in one array: a step reads a row, and writes it, at once and not column by column.

A table is a dataclass of arrays of one shape, each int32, uint32, float32 or bool. Packed, they stand side by side
along one axis in the order of the fields, as int32: numbers by their bits.
"""

from dataclasses import fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32


def pack(table: Any, axis: int) -> Int32[Array, "..."]:
    """All columns side by side along a new `axis`, counted from the end of the result."""
    columns = [jnp.expand_dims(getattr(table, name), axis) for name in _names(type(table))]
    place = np.arange(len(columns)).reshape(-1, *(1,) * (-1 - axis))
    packed = jnp.zeros((), jnp.int32)
    # Selected, and not concatenated: a selection is fused with what computes the columns.
    for i, values in enumerate(columns):
        if values.dtype == bool:
            packed = jnp.where((place == i) & values, 1, packed)
        else:
            packed = jnp.where(place == i, values.view(jnp.int32), packed)
    return packed


def unpack[T](kind: type[T], packed: Any, axis: int) -> T:
    """The columns along `axis`, by name. On the host they are views of `packed`, but for the booleans."""
    columns = {}
    for i, (name, dtype) in enumerate(_names(kind).items()):
        values = packed[(..., i, *(slice(None),) * (-1 - axis))]
        columns[name] = values != 0 if dtype == "bool" else values if dtype == "int32" else values.view(dtype)
    return kind(**columns)


def num_columns(kind: type) -> int:
    return len(_names(kind))


def _names(kind: Any) -> dict[str, str]:
    """Of the columns, and their dtypes."""
    annotations: dict[str, Any] = {column.name: column.type for column in fields(kind)}
    return {name: annotation.dtypes[0] for name, annotation in annotations.items()}
