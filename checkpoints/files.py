"""Open the files of a checkpoint, and what is known of a tensor before its values are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAX_JSON_BYTES = 100 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint file: its shape, outermost dimension first, and how to read it.

    `read()` gives a new or memory-mapped array of that shape, of f32, f16 or bf16.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, u8 [size], mapped and not read. Raises FileNotFoundError or ValueError naming the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file")
    try:
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty")
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError or ValueError naming the file."""
    data = map_file(path)
    if data.size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: {data.size} bytes are too many for a JSON file")
    try:
        return parse_json(data.tobytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in UTF-8 bytes. Raises ValueError, for a key that comes twice too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a key comes twice in one JSON object")
        return result

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
