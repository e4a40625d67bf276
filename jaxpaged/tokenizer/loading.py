"""Find a model's tokenizer: in a folder in Hugging Face layout, or in a .gguf file's metadata."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from checkpoints import gguf_file
from checkpoints.gguf_file import GGUFFile
from jaxpaged.tokenizer.gguf import tokenizer_from_gguf

# One of these holds the vocabulary. Without any, transformers would make up an empty one from the model's type.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_tokenizer(path: str | Path | GGUFFile) -> PreTrainedTokenizerFast | None:
    """The tokenizer in a folder or a .gguf file, read already or not; chat template included; None where there is none.

    Only local files are read, and no code from the folder is run. `decode` never tidies spaces: its text is what the
    tokens say. Raises FileNotFoundError for a path that does not exist, and ValueError, naming the file and where
    there is one the key, for what is incomplete, corrupt or not supported.
    """
    if isinstance(path, GGUFFile):
        return tokenizer_from_gguf(path)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    return _from_folder(path) if path.is_dir() else tokenizer_from_gguf(gguf_file.read(path))


def _from_folder(path: Path) -> PreTrainedTokenizerFast | None:
    if not any((path / name).is_file() for name in _VOCABULARY_FILES):
        if (path / "tokenizer_config.json").exists():
            raise ValueError(f"{path}: has a tokenizer_config.json but none of {', '.join(_VOCABULARY_FILES)}")
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # corrupt files end in errors of any kind, bare `Exception` from Rust among them
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: the tokenizer cannot be loaded: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{path}: a {type(tokenizer).__name__} is not supported: the folder needs a tokenizer.json")
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer
