"""An LLM inference engine that is itself a JAX program."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.engine.config import EngineConfig
    from jaxpaged.engine.engine import Engine
    from jaxpaged.llm import LLM
    from jaxpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamedOutput
    from jaxpaged.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamedOutput",
]

_MODULE_OF = {
    "LLM": "jaxpaged.llm",
    "CompletionOutput": "jaxpaged.outputs",
    "Engine": "jaxpaged.engine.engine",
    "EngineConfig": "jaxpaged.engine.config",
    "RequestMetrics": "jaxpaged.outputs",
    "RequestOutput": "jaxpaged.outputs",
    "SamplingParams": "jaxpaged.sampling_params",
    "StreamedOutput": "jaxpaged.outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line's --help, and the trace tools, do not wait for JAX and transformers."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
