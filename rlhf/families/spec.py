"""One model described by numbers: what a Hugging Face config says, in the words the rest of the code uses."""

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """What a weight is for; it decides how each side cuts and fuses the tensor."""

    EMBED = "embed"
    ATTN_NORM = "attn_norm"
    Q, K, V, ATTN_OUT = "q", "k", "v", "attn_out"
    Q_BIAS, K_BIAS, V_BIAS = "q_bias", "k_bias", "v_bias"
    Q_NORM, K_NORM = "q_norm", "k_norm"
    MLP_NORM = "mlp_norm"
    GATE, UP, DOWN = "gate", "up", "down"
    ROUTER = "router"
    EXPERT_GATE, EXPERT_UP, EXPERT_DOWN = "expert_gate", "expert_up", "expert_down"
    FINAL_NORM = "final_norm"
    LM_HEAD = "lm_head"
    VALUE_HEAD = "value_head"


class Head(Enum):
    """What stands on top of the last layer's hidden states."""

    LM = "lm"
    """Next-token logits: `lm_head.weight`, or the embedding itself when tied."""
    VALUE = "value"
    """One number per token: `score.weight` [1, hidden], as in Hugging Face's sequence classifiers."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A weight as the Hugging Face checkpoint names and shapes it, whatever any rank holds of it."""

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int = -1
    """Index of the transformer layer, or -1 outside the layers."""
    expert: int = -1
    """Index of the expert among its layer's, or -1 outside the experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama 3's stretched rotary frequencies. Source: `rope_type: llama3` of Hugging Face configs."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder of the llama kind: RMSNorm, SwiGLU, grouped-query attention, rotary positions.

    With experts, every layer has them in place of its MLP.
    """

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    """Of a dense layer's MLP; no tensor of a model with experts has it, its config only names it."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    init_std: float = 0.02
    sliding_window: int = 0
    """Positions that attention looks back, its own included; 0 for all. Nothing here implements a window: see
    `max_length`."""
    num_experts: int = 0
    """Experts of each layer; 0 for a dense model, and then the next three mean nothing."""
    experts_per_token: int = 0
    """Experts that the router picks for a token: those of its largest probabilities, a softmax over all experts."""
    moe_ffn_size: int = 0
    """Of each expert's MLP."""
    norm_topk_prob: bool = False
    """Whether the probabilities of a token's experts are divided by their sum."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that the model may be given.

        Within its positions and its window, which changes nothing for a sequence that is no longer than it.
        """
        return min(self.max_positions, self.sliding_window or self.max_positions)
