"""Which device, driver and versions the figures are of."""

import os
import subprocess
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import jax

from benchmarks.gpu_check.part import Part

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jaxtyping", "ml_dtypes", "msgspec")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def run(part: Part) -> None:
    device = jax.devices()[0]
    if not part.dry_run and device.platform != "gpu":
        raise RuntimeError(f"jax finds no GPU, only {device.platform}; --dry-run tries everything on a CPU")
    part.put(
        kind=device.device_kind,
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        multiprocessors=getattr(device, "core_count", None),
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        platform_version=device.client.platform_version,
        driver=_driver() if device.platform == "gpu" else None,
        versions=_versions(),
        xla_flags=os.environ.get("XLA_FLAGS"),
        complete=True,
    )
    part.note(f"{device.device_kind}, jax {jax.__version__}")


def _versions() -> dict[str, str | None]:
    plugins = sorted(d.name for d in distributions() if d.name.startswith(("jax-cuda", "jax_cuda")))
    found: dict[str, str | None] = {}
    for name in (*_PACKAGES, *plugins):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return _DRIVER_FILE.read_text().splitlines()[0] if _DRIVER_FILE.exists() else None
