"""A fake interpreter: the real one, but with a version of its own, and with venv and pip only pretended.

pip's arguments are added to the file $PIP_LOG, a line each call; $PIP_DOES may say `fail` or `hang`.
"""

import importlib.metadata
import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def write_python(path: Path, **settings: Any) -> Path:
    """Settings: `version`, a pair; `no_ensurepip`; `free_threaded`; `base`, the interpreter behind a venv's."""
    return write_script(path, f"exec '{sys.executable}' -I -S '{__file__}' '{json.dumps(settings)}' \"$0\" \"$@\"")


def pip(*arguments: str) -> None:
    with open(os.environ["PIP_LOG"], "a") as log:
        log.write(" ".join(arguments) + "\n")
    match os.environ.get("PIP_DOES"):
        case "fail":
            sys.exit("ERROR: no network")
        case "hang":
            time.sleep(60)


def run_code(code: str, version: list[int], base: str, no_ensurepip: bool = False, free_threaded: bool = False) -> None:
    sys.version_info = (*version, 0, "final", 0)  # type: ignore[assignment]
    sys.version = str(version)
    sys.base_prefix = str(Path(base).parent.parent)
    sys._base_executable = base  # type: ignore[attr-defined]
    sysconfig.get_config_vars()["Py_GIL_DISABLED"] = int(free_threaded)
    importlib.metadata.requires = lambda name: ["numpy>=2", 'libtpu==1.2.*; extra == "tpu"']
    if no_ensurepip:
        sys.modules["ensurepip"] = None  # type: ignore[assignment]
    exec(code)


def main(given: str, path: str, *arguments: str) -> None:
    settings = {"base": path} | json.loads(given)
    match arguments:
        case ["-c", code]:
            run_code(code, **settings)
        case ["-m", "venv", folder]:
            write_python(Path(folder) / "bin" / "python", **settings)
        case ["-m", "pip", "install", *rest]:
            pip(*rest)
        case ["--version"]:
            print("Python {}.{}.0".format(*settings["version"]))
        case _:
            sys.exit(f"not pretended: {arguments}")


if __name__ == "__main__":
    main(*sys.argv[1:])
