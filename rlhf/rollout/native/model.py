"""Forward pass of llama-like decoders for generation, tensor-parallel, without autograd.

Legend: H hidden, N rows (tokens), V vocabulary rows of this rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.families.spec import ModelSpec
from rlhf.rollout.native.ffn import Experts, Ffn
from rlhf.rollout.native.kv_cache import KvCache
from rlhf.rollout.native.layout import check_tp, local_heads, param_shapes, vocab_rows
from rlhf.rollout.native.linear import Linear
from rlhf.rollout.native.peers import Peers
from rlhf.rollout.native.rope import rotate_


@dataclass(frozen=True, slots=True)
class PromptPack:
    """Prompts for one prefill, end to end. `tokens` may be longer than the prompts: padding to a good size."""

    tokens: Tensor
    """int64 [N]."""
    rotary: Tensor
    """Rows of the rotary table [N, 2, 1, head_dim]."""
    padded_index: Tensor
    """int64 [N]: where a token lies in the padded [prompts * longest]; 0 for padding tokens."""
    num_tokens: int
    """Real tokens."""
    num_prompts: int
    longest: int
    """Tokens of a padded prompt."""
    source: Tensor
    """int64 [rows]: prompt of each row that enters."""
    slots: Tensor
    """int64 [rows]: slot of each row that enters."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token of each running row, or consecutive ones of one row; the first `num_rows`, then padding."""

    tokens: Tensor
    """int64 [N]."""
    rotary: Tensor
    """Rows of the rotary table [num_rows, 2, 1, head_dim]."""
    kv_index: Tensor
    """From `KvCache.token_index`."""
    mask: Tensor
    """[num_rows, 1, 1, length]: 0 where a token attends, -inf elsewhere."""
    num_rows: int
    slots: slice
    """Whose keys and values they attend to: `num_rows` slots, or one for all."""


class NativeModel:
    """One rank's share of the model. Weights are zero until written to through `params`; then `pack` them."""

    def __init__(self, spec: ModelSpec, peers: Peers, *, dtype: torch.dtype, device: torch.device) -> None:
        check_tp(spec, peers.size)
        self.spec, self.dtype, self.device = spec, dtype, device
        self.heads, self.kv_heads = local_heads(spec, peers.size)
        self._peers = peers
        self._first_vocab = peers.rank * vocab_rows(spec, peers.size)
        shapes = param_shapes(spec, peers.size)
        self.params = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        self._layers = [_Layer(spec, self.params, f"layers.{i}.") for i in range(spec.num_layers)]
        self._head = Linear(self.params["embed.weight" if spec.tied_embeddings else "lm_head.weight"])
        self._is_packed = False

    def _linears(self) -> Iterator[Linear]:
        yield self._head
        for layer in self._layers:
            yield from (layer.qkv, layer.attn_out, *layer.ffn.linears())

    def pack(self) -> None:
        """Copy weights for fast products, unless copies are there."""
        if not self._is_packed:
            for linear in self._linears():
                linear.pack()
        self._is_packed = True

    def unpack(self) -> None:
        """Forget the copies: the weights have changed, or the memory is needed."""
        for linear in self._linears():
            linear.unpack()
        self._is_packed = False

    def prefill(self, pack: PromptPack, cache: KvCache) -> None:
        """Write keys and values of prompts into the cache. Collective over the engine."""
        hidden = self._embed(pack.tokens)
        for i, layer in enumerate(self._layers):
            qkv = self._qkv(hidden, layer, pack.rotary)
            padded = qkv.new_zeros(pack.num_prompts * pack.longest, *qkv.shape[1:])
            padded[pack.padded_index[: pack.num_tokens]] = qkv[: pack.num_tokens]
            padded = padded.view(pack.num_prompts, pack.longest, *qkv.shape[1:])
            kv = padded[:, :, self.heads :].unflatten(2, (2, self.kv_heads))
            cache.write_prompts(i, kv, pack.source, pack.slots)
            if i + 1 == len(self._layers):
                return  # nothing reads what comes after the last layer's keys and values
            mixed = _causal_attention(padded[:, :, : self.heads], kv)
            self._finish_layer(hidden, mixed.flatten(0, 1)[pack.padded_index], layer)

    def decode(self, step: DecodeStep, cache: KvCache) -> Tensor:
        """Logits [N, V] of the token after each row's last one. Collective over the engine."""
        hidden = self.replay(step, cache)
        return self._head(_norm(hidden, self.params["final_norm.weight"], self.spec.norm_eps))

    def replay(self, step: DecodeStep, cache: KvCache) -> Tensor:
        """Hidden states [N, H] before the last norm; keys and values go into the cache. Collective over the engine.

        Tokens of one row have in one step the keys, values and sums that they would have step by step, to the bit.
        """
        hidden = self._embed(step.tokens)
        rows, length = step.num_rows, step.mask.shape[-1]
        mixed = hidden.new_zeros(step.tokens.numel(), self.heads * self.spec.head_dim)
        grouped = mixed[:rows].unflatten(1, (self.kv_heads, -1, self.spec.head_dim))
        for i, layer in enumerate(self._layers):
            qkv = self._qkv(hidden, layer, step.rotary)
            cache.write_tokens(i, step.kv_index, qkv[:, self.heads :])
            queries = qkv[:, : self.heads].unflatten(1, (self.kv_heads, -1))
            keys, values = (part.expand(rows, -1, -1, -1) for part in cache.read(i, step.slots, length))
            grouped.copy_(_cached_attention(queries, keys, values, step.mask))
            self._finish_layer(hidden, mixed, layer)
        return hidden

    def _embed(self, tokens: Tensor) -> Tensor:
        """[N, H]. Each rank looks up its part of the vocabulary; the sum over ranks is the embedding."""
        weight = self.params["embed.weight"]
        if self._peers.size == 1:
            return functional.embedding(tokens, weight)
        local = tokens - self._first_vocab
        is_mine = (local >= 0) & (local < weight.shape[0])
        return self._peers.add_up(functional.embedding(local.where(is_mine, 0), weight) * is_mine.unsqueeze(1))

    def _qkv(self, hidden: Tensor, layer: "_Layer", rotary: Tensor) -> Tensor:
        """[rows, heads + 2 kv_heads, head_dim], queries and keys normed and rotated; rows of `rotary`."""
        qkv = layer.qkv(_norm(hidden, layer.attn_norm, self.spec.norm_eps))
        qkv = qkv[: rotary.shape[0]].unflatten(1, (-1, self.spec.head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = qkv[:, : self.heads], qkv[:, self.heads : self.heads + self.kv_heads]
            queries.copy_(_norm(queries, layer.q_norm, self.spec.norm_eps))
            keys.copy_(_norm(keys, layer.k_norm, self.spec.norm_eps))
        rotate_(qkv[:, : self.heads + self.kv_heads], rotary)
        return qkv

    def _finish_layer(self, hidden: Tensor, mixed: Tensor, layer: "_Layer") -> None:
        """Output projection of attention [N, heads * head_dim] and the FFN, added to hidden [N, H] in place."""
        hidden.add_(self._peers.add_up(layer.attn_out(mixed)))
        hidden.add_(self._peers.add_up(layer.ffn(_norm(hidden, layer.mlp_norm, self.spec.norm_eps))))


class _Layer:
    """Weights of one decoder layer."""

    def __init__(self, spec: ModelSpec, params: Mapping[str, Tensor], prefix: str) -> None:
        self.attn_norm, self.mlp_norm = params[prefix + "attn_norm.weight"], params[prefix + "mlp_norm.weight"]
        self.q_norm, self.k_norm = params.get(prefix + "q_norm.weight"), params.get(prefix + "k_norm.weight")
        self.qkv = Linear(params[prefix + "qkv.weight"], params.get(prefix + "qkv.bias"))
        self.attn_out = Linear(params[prefix + "attn_out.weight"])
        self.ffn = (
            Experts(spec, *(params[f"{prefix}{name}.weight"] for name in ("router", "experts.gate_up", "experts.down")))
            if spec.num_experts
            else Ffn(params[prefix + "gate_up.weight"], params[prefix + "down.weight"])
        )


def _norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, in fp32."""
    wide = values.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(values.dtype).mul_(weight)


def _causal_attention(queries: Tensor, kv: Tensor) -> Tensor:
    """[prompts, tokens, heads * head_dim] of padded prompts; padding is at the right, so no real token sees it."""
    keys, values = kv.unbind(2)
    mixed = functional.scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(2)


def _cached_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[rows, kv_heads, group, head_dim] of one query a head: heads that share keys stand as query positions."""
    if queries.shape[0] == 1:  # a single row takes another kernel, whose last bits differ
        queries, keys, values, mask = (t.expand(2, *t.shape[1:]) for t in (queries, keys, values, mask))
        return _cached_attention(queries, keys, values, mask)[:1]
    mask = mask.expand(-1, -1, queries.shape[2], -1)
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
