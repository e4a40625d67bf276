"""The GGUF format: metadata fields, then tensor descriptions, then the values, each aligned.

Written by hand because a file may be truncated or corrupt: every count and offset is checked against the bytes that
are there before anything of its size is made. The `gguf` package gives the types and the dequantization.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from checkpoints.files import StoredTensor, map_file

QUANTIZATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_DIMS = 4
_MAX_ALIGNMENT = 2**20


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file: metadata as Python values (numbers, strings, lists of them) and tensors by name."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read(path: Path) -> GGUFFile:
    """Read the metadata; the values of the tensors stay in the file until they are read.

    Raises FileNotFoundError, or ValueError naming the file, and the field or tensor, where something is wrong.
    """
    cursor = _Cursor(path, map_file(path))
    if cursor.take(4) != b"GGUF":
        raise ValueError(f"{path}: not a GGUF file")
    version = cursor.number(_U32)
    if version not in (2, 3):
        raise ValueError(f"{path}: GGUF version {version} is not supported (supported: 2 and 3, little-endian)")
    num_tensors, num_fields = cursor.number(_U64), cursor.number(_U64)
    # The least that a description takes: lengths, type and, for tensors, offset and number of dimensions.
    cursor.expect(num_fields, 8 + 4 + 1)
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        cursor.place = f"field {key!r:.120}"
        if key in fields:
            raise cursor.error("comes twice")
        fields[key] = cursor.value(cursor.number(_U32))
    cursor.place = "tensor descriptions"
    cursor.expect(num_tensors, 8 + 4 + 4 + 8)
    described = [_describe(cursor) for _ in range(num_tensors)]
    cursor.place = "field 'general.alignment'"
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(f"{alignment!r:.40} is not a power of two up to {_MAX_ALIGNMENT}")
    values = cursor.data[-(-cursor.offset // alignment) * alignment :]
    return GGUFFile(path, fields, _locate(cursor, described, values, alignment))


@dataclass(frozen=True)
class _Description:
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    raw_shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.raw_shape)


def _describe(cursor: _Cursor) -> _Description:
    name = cursor.string()
    cursor.place = f"tensor {name!r:.120}"
    num_dims = cursor.number(_U32)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(f"{num_dims} dimensions are not 1 to {_MAX_DIMS}")
    # The file gives the innermost dimension first.
    shape = tuple(cursor.number(_U64) for _ in range(num_dims))[::-1]
    number, begin = cursor.number(_U32), cursor.number(_U64)
    known = {kind.value: kind for kind in GGMLQuantizationType}
    kind = known.get(number)
    if kind is None or kind.name not in QUANTIZATIONS:
        shown = number if kind is None else kind.name
        raise cursor.error(f"type {shown} is not supported (supported: {', '.join(QUANTIZATIONS)})")
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise cursor.error(f"a row of {shape[-1]} is not a multiple of the {block_size} values in a {kind.name} block")
    return _Description(name, shape, kind, begin, (*shape[:-1], shape[-1] // block_size * block_bytes))


def _locate(
    cursor: _Cursor, described: list[_Description], values: np.ndarray, alignment: int
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    position = 0
    for tensor in sorted(described, key=lambda tensor: tensor.begin):
        cursor.place = f"tensor {tensor.name!r:.120}"
        if tensor.name in tensors:
            raise cursor.error("comes twice")
        if tensor.begin % alignment:
            raise cursor.error(f"its offset {tensor.begin} is not a multiple of {alignment}")
        if tensor.begin < position:
            raise cursor.error("shares bytes with another tensor")
        position = tensor.end
        if position > values.size:
            raise cursor.error(
                f"its values end at byte {position}, the file has {values.size} bytes of values: it is truncated"
            )
        raw = values[tensor.begin : position]
        tensors[tensor.name] = StoredTensor(cursor.path, tensor.name, tensor.shape, partial(_dequantize, raw, tensor))
    return tensors


def _dequantize(raw: np.ndarray, tensor: _Description) -> np.ndarray:
    # A corrupt block scale may be NaN or overflow: values, not warnings, are the reader's business.
    with np.errstate(all="ignore"):
        return dequantize(raw.reshape(tensor.raw_shape), tensor.kind).reshape(tensor.shape)


class _Cursor:
    """A place in the bytes of a file that never reads beyond them; `place` says in errors what was being read."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.data = data
        self._bytes = memoryview(data)  # slices several times faster than the array
        self.offset = 0
        self.place = "header"

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {self.place}: {message}")

    def expect(self, count: int, least_bytes: int) -> None:
        left = self.data.size - self.offset
        if count * least_bytes > left:
            raise self.error(f"{count} entries do not fit in the {left} bytes left: truncated or corrupt")

    def take(self, count: int) -> bytes:
        self.expect(count, 1)
        self.offset += count
        return self._bytes[self.offset - count : self.offset].tobytes()

    def number(self, kind: struct.Struct) -> int:
        return kind.unpack(self.take(kind.size))[0]

    def string(self) -> str:
        try:
            return self.take(self.number(_U64)).decode()
        except UnicodeDecodeError as error:
            raise self.error("not valid UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number(_U32), self.number(_U64))
        return self.scalars(kind, 1)[0]

    def array(self, kind: int, count: int) -> list[Any]:
        if kind != _STRING:
            return self.scalars(kind, count)
        self.expect(count, 8)
        return [self.string() for _ in range(count)]

    def scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self.error(f"value type {kind} is not supported")
        dtype = np.dtype(f"<{_SCALARS[kind]}")
        self.expect(count, dtype.itemsize)
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return (values != 0).tolist() if kind == _BOOL else values.tolist()
