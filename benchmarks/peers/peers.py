"""The engines that can be measured, and where their environments lie."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).parents[2]
BASELINE = "ours"


@dataclass(frozen=True)
class Peer:
    """module: in `engines/`. environment: the folder of its virtual environment, None for the one that runs the driver.
    weights: a folder of float32 weights, or the GGUF as it is. env: on top of the driver's own environment; `{venv}` is
    the virtual environment.
    """

    name: str
    module: str
    environment: str | None
    dtype: str
    weights: Literal["folder", "gguf"] = "folder"
    env: Mapping[str, str] = field(default_factory=dict)


_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 23,000 tokens in float32, more than the whole load
    "VLLM_NO_USAGE_STATS": "1",
}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(BASELINE, "ours", None, "float32"),
        Peer("ours-bf16", "ours", None, "bfloat16"),
        Peer("vllm", "vllm", "vllm", "float32", env=_VLLM),
        Peer("vllm-auto", "vllm", "vllm", "float32", env=_VLLM | {"VLLM_CPU_OMP_THREADS_BIND": "auto"}),
        Peer("vllm-bf16", "vllm", "vllm", "bfloat16", env=_VLLM),
        Peer("transformers", "transformers", "transformers", "float32"),
        Peer("llama-cpp", "llama_cpp", "llama-cpp", "float16", "gguf"),
    )
}


def environments() -> Path:
    """The folder of all virtual environments of peers: JAXPAGED_PEERS, or .venv/peers."""
    return Path(os.environ.get("JAXPAGED_PEERS") or REPOSITORY / ".venv" / "peers")


def python(peer: Peer) -> Path:
    if peer.environment is None:
        return Path(sys.executable)
    return environments() / peer.environment / "bin" / "python"


def command(peer: Peer, workload: Path, model: Path) -> list[str]:
    return [str(python(peer)), "-m", f"benchmarks.peers.engines.{peer.module}", str(workload), str(model), peer.dtype]


def environment(peer: Peer) -> dict[str, str]:
    own = {name: value.format(venv=python(peer).parents[1]) for name, value in peer.env.items()}
    return {**os.environ, **own}
