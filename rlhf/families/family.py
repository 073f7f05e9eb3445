"""What a model family is, as data: its tensors, the defaults of its config and what its configs may not ask for.

Knows no checkpoint file, no rank and no library's own names besides Hugging Face's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.families.spec import Part


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One kind of weight: its name (with `{layer}` and `{expert}` where each has one) and its dims by name of extent.

    Extents: vocab, hidden, ffn, q (heads * head_dim), kv (KV heads * head_dim), head_dim, experts, moe_ffn, one.
    """

    part: Part
    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """What a family says of its experts."""

    count_key: str
    """Config key of their number, as hub checkpoints spell it; either spelling of `EXPERT_COUNT_KEYS` is read."""
    ffn_key: str
    """Config key of the size of an expert's MLP."""
    norm_topk_prob: bool | None
    """What the family always does; None where its config's `norm_topk_prob` says."""
    rules: tuple[TensorRule, ...]
    """Tensors of one expert, in the order of the forward pass. The router's is a tensor of the layer."""


EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts")
"""transformers 5.x writes the second for every family, 4.x the family's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of decoders that share names, shapes and config keys."""

    name: str
    """`model_type` of its Hugging Face configs."""
    class_stem: str
    """Its Hugging Face classes are `<class_stem>ForCausalLM` and `<class_stem>ForSequenceClassification`."""
    qkv_bias: bool
    qk_norm: bool
    defaults: Mapping[str, object]
    """Value of a config key that the file leaves out. A key named neither here nor in the file is an error, but for
    num_key_value_heads (as many as heads) and head_dim (hidden_size / heads)."""
    refused: Mapping[str, object] = field(default_factory=dict)
    """Config key -> the only value (or absence) that is supported."""
    embed: TensorRule
    layer: tuple[TensorRule, ...]
    """Tensors of one layer, in the order of the forward pass, but for those of experts, which come last."""
    experts: Experts | None = None
    """None: a dense family."""
    final_norm: TensorRule
    lm_head: TensorRule
    value_head: TensorRule

    @property
    def architectures(self) -> tuple[str, str]:
        """Names that `architectures` of a config may hold."""
        return f"{self.class_stem}ForCausalLM", f"{self.class_stem}ForSequenceClassification"
