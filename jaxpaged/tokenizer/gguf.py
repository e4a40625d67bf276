"""A GGUF file's tokenizer as transformers' class. Its own reader needs torch."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from checkpoints import gguf_file
from jaxpaged.tokenizer.byte_level import byte_level_bpe
from jaxpaged.tokenizer.sentencepiece import sentencepiece_bpe
from jaxpaged.tokenizer.vocabulary import PREFIX, Vocabulary

_BUILDERS = {"gpt2": byte_level_bpe, "llama": sentencepiece_bpe}
# How a file says that it has no tokenizer.
_NO_TOKENIZER = ("none", "no_vocab")


def tokenizer_from_gguf(file: gguf_file.GGUFFile) -> PreTrainedTokenizerFast | None:
    """The tokenizer that the file describes; None where it describes none. Raises ValueError naming file and key."""
    fields = file.fields
    if not any(key.startswith(PREFIX) for key in fields) or fields.get(f"{PREFIX}model") in _NO_TOKENIZER:
        return None
    try:
        vocabulary = Vocabulary.from_fields(fields)
        return _wrap(_add_whole_tokens(_BUILDERS[vocabulary.kind](vocabulary), vocabulary), vocabulary)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _add_whole_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Tokenizer:
    """Special and user-defined tokens are found in text before it is split. No id beyond the file's is ever added."""

    def as_text(ids: list[int]) -> list[AddedToken]:
        contents = [vocabulary.tokens[token_id] for token_id in ids]
        known = [content for content in contents if content and tokenizer.token_to_id(content) is not None]
        return [AddedToken(content, normalized=False) for content in known]

    tokenizer.add_special_tokens(as_text(vocabulary.special_ids))
    tokenizer.add_tokens(as_text(vocabulary.user_defined_ids))
    return tokenizer


def _wrap(tokenizer: Tokenizer, vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=vocabulary.add_bos_token,
        add_eos_token=vocabulary.add_eos_token,
        chat_template=vocabulary.chat_template,
        clean_up_tokenization_spaces=False,
        **{name: vocabulary.tokens[token_id] for name, token_id in vocabulary.named_tokens.items()},
    )
