"""What a model family is, as data: its tensors, the defaults of its config and what its configs may not ask for.

Knows no checkpoint file, no rank and no library's own names besides Hugging Face's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.families.spec import Part


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One kind of weight: its name (with `{layer}` when every layer has one) and its dims by name of extent.

    Extents: vocab, hidden, ffn, q (heads * head_dim), kv (KV heads * head_dim), head_dim, one.
    """

    part: Part
    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of dense decoders that share names, shapes and config keys."""

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
    """Tensors of one layer, in the order of the forward pass."""
    final_norm: TensorRule
    lm_head: TensorRule
    value_head: TensorRule

    @property
    def architectures(self) -> tuple[str, str]:
        """Names that `architectures` of a config may hold."""
        return f"{self.class_stem}ForCausalLM", f"{self.class_stem}ForSequenceClassification"
