"""The safetensors format: 8 bytes with the length of a JSON header, the header, then the values of all tensors."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.files import MAX_JSON_BYTES, StoredTensor, map_file, parse_json

DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


def read(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name; values stay in the file until they are read.

    Raises FileNotFoundError, or ValueError naming the file, and the tensor, where something is wrong.
    """
    data = map_file(path)
    if data.size < 8:
        raise ValueError(f"{path}: {data.size} bytes are too few for a safetensors file")
    header_size = int.from_bytes(data[:8].tobytes(), "little")
    if header_size > min(data.size - 8, MAX_JSON_BYTES):
        raise ValueError(f"{path}: not a safetensors file, or truncated (header of {header_size} bytes in {data.size})")
    try:
        header = parse_json(data[8 : 8 + header_size].tobytes())
    except ValueError as error:
        raise ValueError(f"{path}: the safetensors header is {error}") from error
    header.pop("__metadata__", None)
    values = data[8 + header_size :]
    tensors, spans = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = _entry(entry)
            if not begin <= end <= values.size:
                raise ValueError(f"bytes {begin} to {end} of {values.size} are not in the file: truncated?")
            if math.prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"shape {list(shape)} of {dtype} does not fill {end - begin} bytes")
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r:.120}: {error}") from error
        spans.append((begin, end, name))
        tensors[name] = StoredTensor(path, name, shape, partial(_view, values[begin:end], dtype, shape))
    _check_spans(path, sorted(spans), values.size)
    return tensors


def _entry(entry: Any) -> tuple[np.dtype, tuple[int, ...], tuple[int, int]]:
    if not isinstance(entry, dict):
        raise ValueError("its header entry is not an object")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"dtype {kind!r:.40} is not supported (supported: {', '.join(DTYPES)})")
    sizes, span = _sizes("shape", shape), _sizes("data_offsets", offsets)
    if len(span) != 2:
        raise ValueError(f"data_offsets {list(span)} are not two offsets")
    return DTYPES[kind], sizes, (span[0], span[1])


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 8 or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError(f"{name} {value!r:.80} is not a list of up to 8 sizes")
    return tuple(value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """The format leaves no byte between tensors, none twice and none behind them."""
    position = 0
    for begin, end, name in spans:
        if begin != position:
            raise ValueError(f"{path}: tensor {name!r:.120}: starts at byte {begin} of the values, expected {position}")
        position = end
    if position != size:
        raise ValueError(f"{path}: {size - position} bytes after the last tensor belong to none")


def _view(raw: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return raw.view(dtype).reshape(shape)
