"""A llama-like decoder, its gradients and AdamW, in float64 on one process: one row at a time, written from the papers.

Weights carry Hugging Face names. Nothing here is shared with the package but the description of a model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, ModelSpec


def random_weights(spec: ModelSpec, head: Head, seed: int) -> dict[str, Tensor]:
    """float64 weights that fp32 holds exactly; norms near 1, matrices of a size that lets every part matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for tensor in logical_tensors(spec, head=head):
        drawn = 0.2 * torch.randn(tensor.shape, generator=generator)
        is_norm = "norm" in tensor.name
        weights[tensor.name] = (1.0 + drawn if is_norm else drawn).double()
    return weights


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotate(x: Tensor, theta: float) -> Tensor:
    """x [heads, tokens, dim]; rotates the pairs (i, i + dim / 2)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _attention(weights: dict[str, Tensor], at: str, x: Tensor, spec: ModelSpec) -> Tensor:
    def project(name: str, heads: int) -> Tensor:
        out = x @ weights[f"{at}{name}_proj.weight"].T
        out = out + weights.get(f"{at}{name}_proj.bias", torch.zeros((), dtype=torch.float64))
        out = out.view(len(x), heads, spec.head_dim).transpose(0, 1)
        return _norm(out, weights[f"{at}{name}_norm.weight"], spec.norm_eps) if spec.qk_norm and name != "v" else out

    q = _rotate(project("q", spec.num_heads), spec.rope_theta)
    k = _rotate(project("k", spec.num_kv_heads), spec.rope_theta)
    v = project("v", spec.num_kv_heads)
    shared = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
    logits = q @ k.transpose(1, 2) / spec.head_dim**0.5
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = logits.masked_fill(later, -torch.inf).softmax(-1) @ v
    return mixed.transpose(0, 1).reshape(len(x), -1) @ weights[f"{at}o_proj.weight"].T


def _mlp(weights: dict[str, Tensor], at: str, x: Tensor, _spec: ModelSpec) -> Tensor:
    gate = torch.nn.functional.silu(x @ weights[at + "gate_proj.weight"].T)
    return (gate * (x @ weights[at + "up_proj.weight"].T)) @ weights[at + "down_proj.weight"].T


def _experts(weights: dict[str, Tensor], at: str, x: Tensor, spec: ModelSpec) -> Tensor:
    """Each token through its experts, one at a time."""
    rows = []
    for token in x:
        chances = (token @ weights[at + "gate.weight"].T).softmax(-1)
        chosen = chances.argsort(descending=True)[: spec.experts_per_token].tolist()
        total = sum(chances[expert] for expert in chosen) if spec.norm_topk_prob else 1.0
        outputs = [chances[e] / total * _mlp(weights, f"{at}experts.{e}.", token, spec) for e in chosen]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


def hidden_states(weights: dict[str, Tensor], spec: ModelSpec, tokens: Tensor) -> Tensor:
    """After the final norm, [tokens, hidden]; tokens int64 of one row."""
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}."
        normed = _norm(x, weights[at + "input_layernorm.weight"], spec.norm_eps)
        x = x + _attention(weights, at + "self_attn.", normed, spec)
        normed = _norm(x, weights[at + "post_attention_layernorm.weight"], spec.norm_eps)
        x = x + (_experts if spec.num_experts else _mlp)(weights, at + "mlp.", normed, spec)
    return _norm(x, weights["model.norm.weight"], spec.norm_eps)


def logprobs_and_entropy(
    weights: dict[str, Tensor], spec: ModelSpec, tokens: Tensor, response: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Of the last `response` tokens of a row."""
    head = weights["model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"]
    states = hidden_states(weights, spec, tokens)[len(tokens) - response - 1 : -1]
    logp = (states @ head.T / temperature).log_softmax(-1)
    targets = tokens[len(tokens) - response :]
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def values(weights: dict[str, Tensor], spec: ModelSpec, tokens: Tensor, response: int) -> Tensor:
    """Before each of the last `response` tokens of a row."""
    states = hidden_states(weights, spec, tokens)[len(tokens) - response - 1 : -1]
    return (states @ weights["score.weight"].T)[:, 0]


@dataclass
class AdamW:
    """Decoupled weight decay on matrices only; gradients clipped by their global norm before."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float

    def __post_init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.steps = 0

    def step(self, weights: dict[str, Tensor], grads: dict[str, Tensor], lr: float) -> tuple[float, float]:
        """Update weights in place; returns the norm before clipping and the clip factor."""
        norm = sum(float(grad.square().sum()) for grad in grads.values()) ** 0.5
        factor = min(1.0, self.clip_grad / (norm + 1e-6))
        self.steps += 1
        for name, weight in weights.items():
            grad = factor * grads[name]
            first = self.first.get(name, torch.zeros_like(grad))
            second = self.second.get(name, torch.zeros_like(grad))
            self.first[name] = self.betas[0] * first + (1 - self.betas[0]) * grad
            self.second[name] = self.betas[1] * second + (1 - self.betas[1]) * grad.square()
            mean = self.first[name] / (1 - self.betas[0] ** self.steps)
            root = (self.second[name] / (1 - self.betas[1] ** self.steps)).sqrt()
            decay = self.weight_decay if weight.dim() > 1 else 0.0
            weight.data = weight.data - lr * decay * weight.data - lr * mean / (root + self.eps)
        return norm, factor
