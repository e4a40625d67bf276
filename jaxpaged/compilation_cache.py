"""Keep compiled programs between starts, for programs that own their process."""

import os
from pathlib import Path

import jax


def use_compilation_cache() -> None:
    """Turn on JAX's compilation cache on disk, in the user's cache folder unless JAX_COMPILATION_CACHE_DIR names one.

    All programs are kept, the small ones, too, since a start has several of them. Call it before anything compiles. It
    is JAX's configuration of the whole process, so a library does not call it.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxpaged" / "xla"))
