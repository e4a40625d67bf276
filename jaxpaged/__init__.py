"""An LLM inference engine that is itself a JAX program."""

__version__ = "0.1.0"
