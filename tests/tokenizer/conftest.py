"""The tokenizers of real files, loaded once, and a machine without a network."""

import socket

import pytest
from transformers import PreTrainedTokenizerFast

from jaxpaged.tokenizer import load_tokenizer
from tests.tokenizer import files


def refuse(*args, **kwargs):
    raise AssertionError("the network was used")


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerFast:
    """SmolLM2's, byte-level."""
    return load_tokenizer(files.installed(files.SMOLLM2))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory) -> PreTrainedTokenizerFast:
    """Gemma 3's, SentencePiece. Loaded without a network: transformers may look up the name of a large vocabulary."""
    path = tmp_path_factory.mktemp("gemma3") / "gemma3.gguf"
    path.write_bytes(files.header(files.installed(files.GEMMA3)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut_off(monkeypatch)
        return load_tokenizer(path)


def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of the network fails the test."""
    cut_off(monkeypatch)
