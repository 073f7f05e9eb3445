"""Forward pass of llama-like decoders for generation, tensor-parallel, without autograd.

Hidden states are kept as [features, rows]: then every projection is `weight @ hidden`, which MKL runs up to twice as
fast as `linear` for the few rows of a decoding step; halves of a fused projection are contiguous; and the gathered
logits of all ranks are already in the order of the vocabulary. Legend: H hidden, N rows (tokens), V vocabulary rows of
this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.families.spec import ModelSpec
from rlhf.rollout.native.kv_cache import KvCache
from rlhf.rollout.native.layout import check_tp, local_heads, param_shapes, vocab_rows
from rlhf.rollout.native.peers import Peers
from rlhf.rollout.native.rope import rotate_

FULL_ROWS = 16
"""With a multiple of so many rows MKL's result for a row does not depend, to the bit, on the other rows or their
number (seen with torch 2.13 on AVX-512; with 8 rows and fewer it takes other kernels), and its speed a row is best."""


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
    """One token of each running row. The first `num_rows` are real, the others padding."""

    tokens: Tensor
    """int64 [N]."""
    rotary: Tensor
    """Rows of the rotary table [num_rows, 2, 1, head_dim]."""
    kv_index: Tensor
    """From `KvCache.token_index`."""
    mask: Tensor
    """[num_rows, 1, 1, length]: 0 where a row attends, -inf elsewhere."""
    num_rows: int


class NativeModel:
    """One rank's share of the model. Weights are zero until written to through `params`."""

    def __init__(self, spec: ModelSpec, peers: Peers, *, dtype: torch.dtype, device: torch.device) -> None:
        check_tp(spec, peers.size)
        self.spec, self.dtype, self.device = spec, dtype, device
        self.heads, self.kv_heads = local_heads(spec, peers.size)
        self._peers = peers
        self._first_vocab = peers.rank * vocab_rows(spec, peers.size)
        shapes = param_shapes(spec, peers.size)
        self.params = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        self._mean = torch.full((1, spec.hidden_size), 1 / spec.hidden_size, device=device)
        self._layers = [self._layer_params(i) for i in range(spec.num_layers)]

    def _layer_params(self, layer: int) -> dict[str, Tensor]:
        prefix = f"layers.{layer}."
        return {name.removeprefix(prefix): p for name, p in self.params.items() if name.startswith(prefix)}

    def prefill(self, pack: PromptPack, cache: KvCache) -> None:
        """Write keys and values of prompts into the cache. Collective over the engine."""
        hidden = self._embed(pack.tokens)
        for i, params in enumerate(self._layers):
            qkv = self._qkv(hidden, params, pack.rotary)
            padded = qkv.new_zeros(pack.num_prompts * pack.longest, *qkv.shape[1:])
            padded[pack.padded_index[: pack.num_tokens]] = qkv[: pack.num_tokens]
            padded = padded.view(pack.num_prompts, pack.longest, *qkv.shape[1:])
            kv = padded[:, :, self.heads :].unflatten(2, (2, self.kv_heads))
            cache.write_prompts(i, kv, pack.source, pack.slots)
            if i + 1 == len(self._layers):
                return  # nothing reads what comes after the last layer's keys and values
            mixed = _causal_attention(padded[:, :, : self.heads], kv)
            self._finish_layer(hidden, mixed.flatten(0, 1)[pack.padded_index], params)

    def decode(self, step: DecodeStep, cache: KvCache) -> Tensor:
        """Logits [V, N] of the token after each row's last one. Collective over the engine."""
        hidden = self._embed(step.tokens)
        rows, length = step.num_rows, step.mask.shape[-1]
        mixed = hidden.new_zeros(step.tokens.numel(), self.heads * self.spec.head_dim)
        grouped = mixed[:rows].unflatten(1, (self.kv_heads, -1, self.spec.head_dim))
        for i, params in enumerate(self._layers):
            qkv = self._qkv(hidden, params, step.rotary)[:rows]
            cache.write_tokens(i, step.kv_index, qkv[:, self.heads :])
            queries = qkv[:, : self.heads].unflatten(1, (self.kv_heads, -1))
            grouped.copy_(_cached_attention(queries, *cache.read(i, rows, length), step.mask))
            self._finish_layer(hidden, mixed, params)
        hidden = self._norm(hidden, self.params["final_norm.weight"])
        return _project(self.params["embed.weight" if self.spec.tied_embeddings else "lm_head.weight"], hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        """[H, N]. Each rank looks up its part of the vocabulary; the sum over ranks is the embedding."""
        weight = self.params["embed.weight"]
        if self._peers.size == 1:
            return functional.embedding(tokens, weight).t().contiguous()
        local = tokens - self._first_vocab
        is_mine = (local >= 0) & (local < weight.shape[0])
        found = functional.embedding(local.where(is_mine, 0), weight) * is_mine.unsqueeze(1)
        return self._peers.add_up(found.t().contiguous())

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the features of [H, N], in fp32.

        The mean is a matrix product, since the order in which `mean` adds depends on N and on the row.
        """
        wide = hidden.float()
        scale = torch.mm(self._mean, wide.square()).add_(self.spec.norm_eps).rsqrt_()
        return (wide * scale).to(hidden.dtype).mul_(weight.unsqueeze(1))

    def _qkv(self, hidden: Tensor, params: dict[str, Tensor], rotary: Tensor) -> Tensor:
        """[rows, heads + 2 kv_heads, head_dim], queries and keys normed and rotated; rows of `rotary`."""
        qkv = _project(params["qkv.weight"], self._norm(hidden, params["attn_norm.weight"]))
        if self.spec.qkv_bias:
            qkv.add_(params["qkv.bias"].unsqueeze(1))
        qkv = qkv[:, : rotary.shape[0]].t().contiguous().unflatten(1, (-1, self.spec.head_dim))
        if self.spec.qk_norm:
            queries, keys = qkv[:, : self.heads], qkv[:, self.heads : self.heads + self.kv_heads]
            _head_norm_(queries, params["q_norm.weight"], self.spec.norm_eps)
            _head_norm_(keys, params["k_norm.weight"], self.spec.norm_eps)
        rotate_(qkv[:, : self.heads + self.kv_heads], rotary)
        return qkv

    def _finish_layer(self, hidden: Tensor, mixed: Tensor, params: dict[str, Tensor]) -> None:
        """Output projection of attention [N, heads * head_dim] and the FFN, added to hidden [H, N] in place."""
        hidden.add_(self._peers.add_up(_project(params["attn_out.weight"], mixed.t())))
        normed = self._norm(hidden, params["mlp_norm.weight"])
        gate, up = _project(params["gate_up.weight"], normed).chunk(2)
        gated = functional.silu(gate, inplace=True).mul_(up)
        hidden.add_(self._peers.add_up(_project(params["down.weight"], gated)))


def _project(weight: Tensor, hidden: Tensor) -> Tensor:
    """Product of weight [out, in] and hidden [in, N]; very few rows are faster when each row is contiguous."""
    return torch.mm(weight, hidden.t().contiguous().t() if hidden.shape[1] < FULL_ROWS else hidden)


def _head_norm_(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Over the last dim of [rows, heads, head_dim], in place."""
    wide = heads.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    heads.copy_((wide * scale).to(heads.dtype) * weight)


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
