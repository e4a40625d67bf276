"""Text to token ids and back: the tokenizer of a model, and text that streams."""

from jaxpaged.tokenizer.detokenizer import Detokenizer
from jaxpaged.tokenizer.loading import load_tokenizer

__all__ = ["Detokenizer", "load_tokenizer"]
