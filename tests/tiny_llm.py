"""A tiny Llama with a tokenizer and a chat template, and one engine for it that many tests share."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxpaged.llm import LLM
from jaxpaged.trace import Event

WITHOUT_TOKENIZER = Path(__file__).parent / "golden" / "llama_tied"
VOCAB_SIZE = 128
EOS = (2, 5)
# Few buckets to compile. The pool is smaller than four sequences at max_model_len, so preemption happens.
SIZES = {
    "block_size": 4,
    "num_blocks": 24,
    "max_num_seqs": 4,
    "max_num_waiting": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "max_steps": 8,
}
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'][0] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|a|>' }}{% endif %}"
)


class Recorder:
    """A trace function that keeps the events; `fail_after` makes it raise once, after so many of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.fail_after: int | None = None

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if self.fail_after is not None and len(self.events) >= self.fail_after:
            self.fail_after = None
            raise RuntimeError("the trace function failed")


def write_tokenizer(folder: Path, chat_template: str | None = _TEMPLATE) -> None:
    """Byte-level, without BOS: a token for each ASCII character and for the bytes of U+1F600; no merges."""
    special = ["<unk>", "<s>", "</s>", "<|u|>", "<|a|>", "<|end|>", "<|s|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False)
    used = [piece for text in map(chr, [*range(32, 127), 10, 0x1F600]) for piece in splits.pre_tokenize_str(text)[0][0]]
    assert set(used) <= set(alphabet)
    words = special + sorted(set(used))
    words += [f"w{i}" for i in range(VOCAB_SIZE - len(words))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


@cache
def tiny_folder() -> Path:
    """The model of the golden files, with a tokenizer of 128 tokens beside it."""
    folder = Path(tempfile.mkdtemp(prefix="tiny_llm_"))
    for name in ("config.json", "model.safetensors"):
        shutil.copy(WITHOUT_TOKENIZER / name, folder / name)
    write_tokenizer(folder)
    return folder


@cache
def recorder() -> Recorder:
    """Hears every event of `tiny_llm()`."""
    return Recorder()


@cache
def tiny_llm() -> LLM:
    return LLM(tiny_folder(), dtype="float32", trace=recorder(), **SIZES)
