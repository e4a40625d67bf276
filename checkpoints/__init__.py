"""Read models from Hugging Face folders and GGUF files."""

from checkpoints.loading import load, read_config
from checkpoints.packages import SMOLLM2, packaged, resolve

__all__ = ["SMOLLM2", "load", "packaged", "read_config", "resolve"]
