"""Compile for an NVIDIA GPU on any machine: jax's CUDA plugin holds XLA's whole GPU compiler, and needs no GPU for it.

    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc     # jax's own version; the last for ptxas

No other NVIDIA package and no driver is needed. Products of matrices are not tuned, since nothing can be timed; the
kernels are those that a GPU would run.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

# The plugin would look for cuDNN and the rest, which only a program that runs needs.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh


@dataclass(frozen=True)
class Chip:
    """What decides a compiled program. shared_memory: bytes of a multiprocessor, and the most of one program in it.
    memory: bytes of HBM; XLA recomputes results where a program would need more."""

    kind: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory: tuple[int, int]
    memory: int
    bytes_per_second: float

    @property
    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        major, minor = self.compute_capability
        whole, most = self.shared_memory
        return f"""
            platform_name: "CUDA" device_description_str: "{self.kind}" dnn_version_info {{ major: 9 minor: 8 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }} core_count: {self.multiprocessors}
              shared_memory_per_core: {whole} shared_memory_per_block_optin: {most} shared_memory_per_block: 49152
              registers_per_core_limit: 65536 registers_per_block_limit: 65536 fpus_per_core: 128
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bytes_per_second:.0f} l2_cache_size: 52428800 clock_rate_ghz: 1.7
              device_memory_size: {self.memory}
            }}"""


# Shared memory per compute capability: CUDA C++ Programming Guide, table of technical specifications.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "H100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, (233472, 232448), 80 * 10**9, 3.35e12),
        "A100": Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, (167936, 166912), 80 * 10**9, 2.04e12),
        "L4": Chip("NVIDIA L4", (8, 9), 58, (102400, 101376), 24 * 10**9, 0.3e12),
        "B200": Chip("NVIDIA B200", (10, 0), 148, (233472, 232448), 180 * 10**9, 8e12),
    }
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a compiled program, ours or XLA's own. registers of a thread, spilled_bytes: as ptxas tells."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_memory: int
    registers: int
    spilled_bytes: int
    ptx: str

    @property
    def instruction(self) -> str:
        """What multiplies matrices in it."""
        found = re.search(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", self.ptx)
        return found[0] if found else "fma"


@dataclass(frozen=True)
class GPUProgram:
    """A compiled program. sizes: bytes of arguments, outputs, temporaries, and of arguments that outputs reuse."""

    text: str
    sizes: Any
    kernels: tuple[Kernel, ...]
    compile_seconds: float


@cache
def mesh_of(chip: str) -> Mesh:
    """One GPU. Raises KeyError for a name that is not in CHIPS, and ImportError without the plugin."""
    import jax_plugins.xla_cuda13  # type: ignore[import-not-found]  # noqa: F401  # else: 'topology not implemented'

    topology = topologies.get_topology_desc(
        chip, platform="cuda", target_config=CHIPS[chip].target_config, topology="1x1x1"
    )
    return Mesh(np.array(topology.devices[:1]), ("chip",))


def compile_for(chip: str, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> GPUProgram:
    """Compile `function`, jitted or not, for one GPU. Leaves of `args` are arrays or ShapeDtypeStructs.

    Raises jax's error where a kernel needs more shared memory than the chip has, and FileNotFoundError without ptxas.
    """
    mesh = mesh_of(chip)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args)
    if not hasattr(function, "trace"):
        function = jax.jit(function, donate_argnums=donate)
    with use_abstract_mesh(mesh.abstract_mesh):  # tells kernels which chip they are made for
        lowered = function.trace(*shapes).lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"})
        seconds = time.perf_counter() - start
        kernels = tuple(_read_kernels(Path(folder)))
    return GPUProgram(compiled.as_text() or "", compiled.memory_analysis(), kernels, seconds)


def _read_kernels(folder: Path) -> list[Kernel]:
    """From what XLA writes about a program: its sequence of launches, and the assembler text of each kernel."""
    launches = "".join(path.read_text() for path in folder.glob("*.thunk_sequence.txt"))
    launch = re.compile(r"kCustomKernel .*\] (\w+) grid: \[(.*?)\] threads: \[(\d+), .*shared_memory: (\d+) bytes")
    ptx = {}
    for path in folder.glob("*.ptx"):
        text = path.read_text()
        ptx.update(dict.fromkeys(re.findall(r"\.entry (\w+)", text), text))
    kernels = {}
    for name, grid, threads, shared_memory in launch.findall(launches):
        if name not in kernels:
            x, y, z = map(int, grid.split(","))
            registers, spilled = _assemble(ptx[name])
            kernels[name] = Kernel(name, (x, y, z), int(threads), int(shared_memory), registers, spilled, ptx[name])
    return list(kernels.values())


def _assemble(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    architecture = re.search(r"\.target (\w+)", ptx)
    assert architecture
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas(), "-v", "--gpu-name", architecture[1], str(source), "-o", str(source.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
    assert registers and spilled, report
    return int(registers[1]), int(spilled[1])


@cache
def ptxas() -> str:
    """From the package nvidia-cuda-nvcc, or else from PATH."""
    found = next(Path(np.__file__).parents[1].glob("nvidia/*/bin/ptxas"), None) or shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("ptxas is neither in the package nvidia-cuda-nvcc nor on PATH")
    return str(found)


def versions() -> dict[str, str]:
    """Of what decides a compiled program."""
    from importlib.metadata import version

    return {name: version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc")}
