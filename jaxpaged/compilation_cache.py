"""Keep compiled programs between starts, for programs that own their process."""

import os
from pathlib import Path

import jax


def use_compilation_cache() -> None:
    """Turn on JAX's compilation cache on disk, in the user's cache folder unless JAX_COMPILATION_CACHE_DIR names one.

    Call it before anything compiles. It is JAX's configuration of the whole process, so a library does not call it.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxpaged" / "xla"))
