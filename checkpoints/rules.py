"""Which tensor of a checkpoint each parameter is: one table per format and family.

The tables differ only in names and, for GGUF, in the order of the query and key rows. `{}` is the number of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.models.build import ParamPath


@dataclass(frozen=True)
class Rule:
    """The parameter `target` is the tensor `key`. `interleaved_heads` names the number of heads (a field of
    ModelConfig) whose rows pair (2i, 2i + 1) for rotary positions where the model pairs (i, i + head_dim / 2)."""

    key: str
    target: str
    interleaved_heads: str | None = None


@dataclass(frozen=True)
class Table:
    """The rules of one family in one format; tensors that match the pattern `ignored` hold nothing that is needed.

    Where the head is tied, a file may still hold it (`tied_head`), equal to `tied_embedding`.
    """

    rules: tuple[Rule, ...]
    ignored: str
    tied_head: str
    tied_embedding: str

    def find(self, target: ParamPath) -> tuple[str, Rule]:
        """The key of a parameter and its rule. Raises LookupError unless exactly one rule is for it."""
        numbers = [part for part in target if isinstance(part, int)]
        template = ".".join("{}" if isinstance(part, int) else part for part in target)
        found = [rule for rule in self.rules if rule.target == template]
        if len(found) != 1:
            raise LookupError(f"{len(found)} rules are for the parameter {template}")
        return found[0].key.format(*numbers), found[0]


def _layers(prefix: str, norms: dict[str, str], linears: dict[str, str], interleaved: dict[str, str]) -> list[Rule]:
    """Rules for every layer: the weights of norms, the weights and biases of linear layers."""
    parts = [(f"{name}.weight", f"{target}.scale") for name, target in norms.items()]
    for name, target in linears.items():
        parts += [(f"{name}.weight", f"{target}.kernel"), (f"{name}.bias", f"{target}.bias")]
    return [
        Rule(f"{prefix}.{{}}.{key}", f"layers.{{}}.{target}", interleaved.get(target.rpartition(".")[0]))
        for key, target in parts
    ]


LLAMA_HF = Table(
    rules=(
        Rule("model.embed_tokens.weight", "embedding.table"),
        Rule("model.norm.weight", "final_norm.scale"),
        Rule("lm_head.weight", "head.kernel"),
        *_layers(
            "model.layers",
            norms={"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
            linears={
                "self_attn.q_proj": "attention.query",
                "self_attn.k_proj": "attention.key",
                "self_attn.v_proj": "attention.value",
                "self_attn.o_proj": "attention.output",
                "mlp.gate_proj": "mlp.gate",
                "mlp.up_proj": "mlp.up",
                "mlp.down_proj": "mlp.down",
            },
            interleaved={},
        ),
    ),
    ignored=r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq",  # computed; old files hold them
    tied_head="lm_head.weight",
    tied_embedding="model.embed_tokens.weight",
)

LLAMA_GGUF = Table(
    rules=(
        Rule("token_embd.weight", "embedding.table"),
        Rule("output_norm.weight", "final_norm.scale"),
        Rule("output.weight", "head.kernel"),
        *_layers(
            "blk",
            norms={"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"},
            linears={
                "attn_q": "attention.query",
                "attn_k": "attention.key",
                "attn_v": "attention.value",
                "attn_output": "attention.output",
                "ffn_gate": "mlp.gate",
                "ffn_up": "mlp.up",
                "ffn_down": "mlp.down",
            },
            interleaved={"attention.query": "num_heads", "attention.key": "num_kv_heads"},
        ),
    ),
    ignored=r"rope_freqs\.weight",  # read into ModelConfig.rope_factors
    tied_head="output.weight",
    tied_embedding="token_embd.weight",
)

HF_TABLES = {"llama": LLAMA_HF}
GGUF_TABLES = {"llama": LLAMA_GGUF}
