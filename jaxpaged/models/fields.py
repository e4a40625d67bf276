"""Typed look-ups in configuration read from a file, where any key may be missing and any value may be wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Sizes are int32 on devices; no real model comes near, and a corrupt number is found before anything is allocated.
MAX_INT = 2**31 - 1


def check_int(name: str, value: Any, low: int, high: int = MAX_INT) -> int:
    """`value` if it is an integer from `low` to `high`; else ValueError naming it."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r:.80} is not an integer from {low} to {high}")
    return value


def check_positive(name: str, value: Any) -> float:
    """`value` as a float if it is a finite number above 0; else ValueError naming it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or abs(value) > 1e300 or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r:.80} is not a positive number")
    return float(value)


class Fields:
    """A mapping read with one method per type. A key that is missing or null takes `default`; without one it is an
    error. Every error is a ValueError that names the key."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self._prefix}{key} is missing")
        return value

    def size(self, key: str, default: int | None = None, high: int = MAX_INT) -> int:
        """An integer from 1 to `high`."""
        return check_int(self._prefix + key, self._get(key, default), 1, high)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        return check_positive(self._prefix + key, self._get(key, default))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._prefix}{key}={value!r:.80} is not true or false")
        return value

    def choice(self, key: str, supported: tuple[str, ...], default: str | None = None) -> str:
        """One of the strings in `supported`."""
        value = self._get(key, default)
        if value not in supported:
            raise ValueError(f"{self._prefix}{key}={value!r:.80} is not supported (supported: {', '.join(supported)})")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or nothing -> sorted, without repeats."""
        value = self._values.get(self._prefix + key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(sorted({check_int(self._prefix + key, item, 0) for item in values}))

    def token_id(self, key: str) -> int | None:
        """A token id, or None where there is none."""
        ids = self.token_ids(key)
        if len(ids) > 1:
            raise ValueError(f"{self._prefix}{key}={list(ids)} is not one token id")
        return ids[0] if ids else None
