"""Compile for a TPU on a machine without one: libtpu holds the whole compiler.

What comes out cannot run there, but it is the program that a TPU would run.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

# The compiler would write a log for each process, ask a cloud which machine this is, and refuse a second process.
_ENVIRONMENT = {
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# A chip, and the smallest slice of it that has a name.
CHIPS: Mapping[str, str] = MappingProxyType({"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"})


@dataclass(frozen=True)
class Program:
    """A compiled program. seconds: of tracing and lowering, and of compiling. cpu_seconds: of both, on all cores."""

    compiled: jax.stages.Compiled
    trace_seconds: float
    compile_seconds: float
    cpu_seconds: float

    @property
    def text(self) -> str:
        """The optimised HLO, scheduled and with its memory assigned."""
        return self.compiled.as_text() or ""

    @property
    def sizes(self) -> Any:
        """Bytes of arguments, outputs, temporaries, and of the arguments that outputs reuse."""
        return self.compiled.memory_analysis()

    @property
    def bytes_accessed(self) -> int:
        """What the compiler counts in HBM: operands and results of each operation; of a kernel, what it declares."""
        costs: Any = self.compiled.cost_analysis()
        return int(costs["bytes accessed"])


@cache
def mesh_of(chip: str) -> Mesh:
    """One chip. Raises KeyError for a name that is not in CHIPS, and ImportError without libtpu."""
    libtpu = _libtpu().locate_file("libtpu/libtpu.so")
    for name, value in {**_ENVIRONMENT, "TPU_LIBRARY_PATH": str(libtpu)}.items():
        os.environ.setdefault(name, value)
    devices = topologies.get_topology_desc(CHIPS[chip], platform="tpu").devices
    return Mesh(np.array(devices[:1]), ("chip",))


def compile_for(chip: str, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Program:
    """Compile `function`, jitted or not, for one chip. Leaves of `args` are arrays or ShapeDtypeStructs.

    Raises RuntimeError if what comes out is no program for a TPU.
    """
    mesh = mesh_of(chip)
    everywhere = NamedSharding(mesh, PartitionSpec())
    # Without a device among the arguments it would compile for the default platform.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args)
    if not hasattr(function, "trace"):
        function = jax.jit(function, donate_argnums=donate)
    cpu_start, start = time.process_time(), time.perf_counter()
    with use_abstract_mesh(mesh.abstract_mesh):  # tells kernels which chip they are made for
        lowered = function.trace(*shapes).lower(lowering_platforms=("tpu",))
    lowered_at = time.perf_counter()
    compiled, compiled_at = lowered.compile(), time.perf_counter()
    program = Program(compiled, lowered_at - start, compiled_at - lowered_at, time.process_time() - cpu_start)
    if ":T(" not in program.text:
        raise RuntimeError(f"compiled for {chip}, but the layouts have no tiles: this is not a program for a TPU")
    return program


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def versions() -> dict[str, str]:
    """Of what decides a compiled program."""
    return {"jax": metadata.version("jax"), "jaxlib": metadata.version("jaxlib"), "libtpu": _libtpu().version}


def _libtpu() -> metadata.Distribution:
    """Where tools/setup.sh has put it for the tests, or among the other packages, where a machine with a TPU has it."""
    for path in ([f"{sys.prefix}/tpu-compiler"], sys.path):
        for found in metadata.distributions(name="libtpu", path=path):
            return found
    raise ImportError("no libtpu, which holds the TPU compiler: `tools/setup.sh test` installs it")
