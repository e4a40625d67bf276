"""Read models from Hugging Face folders and GGUF files."""

from checkpoints.loading import Checkpoint, load, open_checkpoint, read_config
from checkpoints.packages import SMOLLM2, packaged, resolve

__all__ = ["SMOLLM2", "Checkpoint", "load", "open_checkpoint", "packaged", "read_config", "resolve"]
