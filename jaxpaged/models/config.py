"""What a model is, as numbers: one frozen record that every checkpoint format is read into."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.models import rope
from jaxpaged.models.fields import Fields, check_int, check_positive

FAMILIES = ("llama",)
ACTIVATIONS = ("silu",)
MAX_HEAD_DIM = 2**16  # rotary factors are made from the configuration alone, before the weights can contradict it

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
          "max_position_embeddings")  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of one model. Raises ValueError, naming the field, for values that no model can have.

    `rope_factors` divides each of the head_dim / 2 rotary frequencies (None: by 1), which every static scaling rule
    comes down to. `eos_token_ids` may be empty; `bos_token_id` is None where there is none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_factors: tuple[float, ...] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown architecture {self.family!r} (supported: {', '.join(FAMILIES)})")
        for name in _SIZES:
            check_int(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even one")
        check_positive("rms_norm_eps", self.rms_norm_eps)
        check_positive("rope_theta", self.rope_theta)
        if self.rope_factors is not None:
            if len(self.rope_factors) != self.head_dim // 2:
                raise ValueError(f"rope_factors holds {len(self.rope_factors)} values, head_dim={self.head_dim}")
            for factor in self.rope_factors:
                check_positive("rope_factors", factor)
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not True or False")
        for token in self.eos_token_ids:
            check_int("eos_token_id", token, 0, self.vocab_size - 1)
        if self.bos_token_id is not None:
            check_int("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the content of a Hugging Face config.json. Raises ValueError naming the key that is missing or wrong."""
        get = Fields(config)
        family = get.choice("model_type", FAMILIES)
        get.choice("hidden_act", ACTIVATIONS, "silu")
        if config.get("quantization_config") is not None:
            raise ValueError("quantization_config is set: a quantized folder is not supported (use a .gguf file)")
        hidden_size, num_heads = get.size("hidden_size"), get.size("num_attention_heads")
        head_dim = get.size("head_dim", _even_share(hidden_size, num_heads), MAX_HEAD_DIM)
        rope_options = _rope_options(config)
        rope_theta = Fields(rope_options).positive("rope_theta", get.positive("rope_theta", 10000.0))
        return cls(
            family=family,
            vocab_size=get.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=get.size("intermediate_size"),
            num_layers=get.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=get.size("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rms_norm_eps=get.positive("rms_norm_eps"),
            rope_theta=rope_theta,
            max_position_embeddings=get.size("max_position_embeddings"),
            rope_factors=rope.factors_from_hf(rope_options, head_dim, rope_theta),
            tie_word_embeddings=get.flag("tie_word_embeddings", False),
            attention_bias=get.flag("attention_bias", False),
            mlp_bias=get.flag("mlp_bias", False),
            eos_token_ids=get.token_ids("eos_token_id"),
            bos_token_id=get.token_id("bos_token_id"),
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelConfig:
        """From a GGUF's metadata; `tensors` are the names in the file, the only place where an untied head and biases
        show. Raises ValueError naming the key that is missing or wrong."""
        general = Fields(fields)
        family = general.choice("general.architecture", FAMILIES)
        get = Fields(fields, prefix=f"{family}.")
        hidden_size, num_heads = get.size("embedding_length"), get.size("attention.head_count")
        head_dim = get.size("attention.key_length", _even_share(hidden_size, num_heads), MAX_HEAD_DIM)
        for key in ("attention.value_length", "rope.dimension_count"):
            if get.size(key, head_dim) != head_dim:
                raise ValueError(f"{family}.{key}={get.size(key)} differs from the head size {head_dim}: not supported")
        tokens = fields.get("tokenizer.ggml.tokens")
        return cls(
            family=family,
            vocab_size=get.size("vocab_size", len(tokens) if isinstance(tokens, list) else None),
            hidden_size=hidden_size,
            intermediate_size=get.size("feed_forward_length"),
            num_layers=get.size("block_count"),
            num_heads=num_heads,
            num_kv_heads=get.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=get.positive("attention.layer_norm_rms_epsilon"),
            rope_theta=get.positive("rope.freq_base", 10000.0),
            max_position_embeddings=get.size("context_length"),
            rope_factors=rope.factors_from_gguf(get, head_dim),
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            eos_token_ids=general.token_ids("tokenizer.ggml.eos_token_id"),
            bos_token_id=general.token_id("tokenizer.ggml.bos_token_id"),
        )


def _rope_options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary options under their new key or the old one; an empty mapping where there are none."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{key}={value!r:.80} is not an object")
        if value is not None:
            return value
    return {}


def _even_share(hidden_size: int, num_heads: int) -> int | None:
    """The head size where the file gives none (None: it has to)."""
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None
