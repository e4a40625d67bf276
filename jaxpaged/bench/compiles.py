"""How many programs JAX compiled, and for how long, from its own monitoring events."""

from dataclasses import dataclass
from typing import Any, Self

import jax

# One for each program that is needed and not in memory; compiled, or loaded from the cache on disk.
_COMPILE = "/jax/core/compile/backend_compile_duration"
_FROM_DISK = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True)
class Compiles:
    """programs: all that had to be made; from_disk: those of them that the cache on disk had. seconds: of all."""

    programs: int = 0
    from_disk: int = 0
    seconds: float = 0.0

    def __sub__(self, earlier: "Compiles") -> "Compiles":
        return Compiles(
            self.programs - earlier.programs, self.from_disk - earlier.from_disk, self.seconds - earlier.seconds
        )

    def __add__(self, other: "Compiles") -> "Compiles":
        return Compiles(self.programs + other.programs, self.from_disk + other.from_disk, self.seconds + other.seconds)


class CompileCounter:
    """Counts between `with` and its end."""

    def __init__(self) -> None:
        self.so_far = Compiles()

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        jax.monitoring.register_event_listener(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._compiled)
        jax.monitoring.unregister_event_listener(self._event)

    def _compiled(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE:
            self.so_far += Compiles(1, 0, duration_secs)

    def _event(self, event: str, **_: Any) -> None:
        if event == _FROM_DISK:
            self.so_far += Compiles(0, 1, 0.0)
