"""Causal core attention on torch's scaled_dot_product_attention, for packed sequences of any lengths.

Sequences of similar length share one call: each is padded at its right end by copies of its last token. Under a causal
mask no real query sees a padded key, and padded queries are dropped, so outputs and gradients are exact.
Shape letters: T tokens of all sequences, H query heads, G key/value heads, D head dim, B sequences of a call, L tokens
of the longest of them.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MIN_FILL = 0.75
"""Sequences share a call when the shorter has at least this share of the longest one's tokens."""
SHORT = 16
"""Sequences up to this many tokens share a call whatever their lengths: there the call costs more than the padding."""


@dataclass(frozen=True, slots=True)
class Call:
    """Sequences that go through one attention call."""

    num_sequences: int
    longest: int
    gather: Tensor
    """int64 [B * L]: token of each padded slot."""
    keep: Tensor
    """int64 [tokens of the call]: slots that are not padding."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """All the calls of one packing."""

    calls: tuple[Call, ...]
    restore: Tensor
    """int64 [T]: row of each token in the calls' results put one after the other."""


def group_lengths(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Indices of the sequences of each call, longest first; empty sequences are in none."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        if not groups or (lengths[index] < MIN_FILL * longest and longest > SHORT):
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return tuple(tuple(sorted(group)) for group in groups)


@lru_cache(maxsize=16)
def plan_calls(cu_seqlens: tuple[int, ...], device: torch.device) -> CallPlan:
    """How the sequences between the boundaries go through attention calls; every layer asks for the same one."""
    lengths = tuple(stop - start for start, stop in pairwise(cu_seqlens))
    calls, order = [], []
    for group in group_lengths(lengths):
        longest = max(lengths[i] for i in group)
        slots = torch.arange(longest)
        sizes = torch.tensor([lengths[i] for i in group])[:, None]
        starts = torch.tensor([cu_seqlens[i] for i in group])[:, None]
        gather = (starts + torch.minimum(slots, sizes - 1)).flatten()
        keep = (slots < sizes).flatten().nonzero().squeeze(1)
        calls.append(Call(len(group), longest, gather.to(device), keep.to(device)))
        order.append(gather[keep])
    restore = torch.argsort(torch.cat(order)) if order else torch.empty(0, dtype=torch.int64)
    return CallPlan(tuple(calls), restore.to(device))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """Attention of a rectangular batch.

    Args:
        query: [B, L, H, D].
        key: [B, L, G, D], H a multiple of G; heads are shared without copying.
        value: As key.
        scale: Of the logits; None is D ** -0.5.

    Returns:
        [B, L, H, D].
    """
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: tuple[int, ...], *, scale: float | None = None
) -> Tensor:
    """Attention inside each of the packed sequences.

    Args:
        query: [T, H, D].
        key: [T, G, D], H a multiple of G.
        value: As key.
        cu_seqlens: Boundaries of the sequences, from 0 to T.
        scale: Of the logits; None is D ** -0.5.

    Returns:
        [T, H, D].
    """
    assert cu_seqlens[-1] == query.shape[0], (
        f"cu_seqlens ends at {cu_seqlens[-1]}, but there are {query.shape[0]} tokens"
    )
    lengths = {stop - start for start, stop in pairwise(cu_seqlens)}
    if len(lengths) == 1:  # packed is rectangular already
        q, k, v = (x.unflatten(0, (len(cu_seqlens) - 1, -1)) for x in (query, key, value))
        return causal_attention(q, k, v, scale=scale).flatten(0, 1)
    plan = plan_calls(cu_seqlens, query.device)
    results = []
    for call in plan.calls:
        shape = (call.num_sequences, call.longest)
        q, k, v = (x.index_select(0, call.gather).unflatten(0, shape) for x in (query, key, value))
        out = causal_attention(q, k, v, scale=scale).flatten(0, 1)
        results.append(out.index_select(0, call.keep))
    return torch.cat(results).index_select(0, plan.restore)


class SDPACoreAttention(MegatronModule):
    """Takes the place of Megatron's DotProductAttention: causal, no dropout, packed or rectangular."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type is AttnMaskType.causal, f"only causal attention is built here, not {attn_mask_type}"
        assert config.context_parallel_size == 1, "context parallelism needs another core attention"
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout), "no dropout here"
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of this rank's heads.

        Args:
            query: [T, H, D] when packed, else [L, B, H, D]; key and value likewise with G heads.
            key: See query.
            value: See query.
            attention_mask: Unused: causal inside each sequence.
            attn_mask_type: Unused.
            attention_bias: Must be None.
            packed_seq_params: Boundaries of the sequences; None for a rectangular batch.

        Returns:
            [T, H * D] when packed, else [L, B, H * D].
        """
        assert attention_bias is None, "attention bias is not built here"
        if packed_seq_params is None:
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            return causal_attention(q, k, v, scale=self.scale).transpose(0, 1).flatten(2)
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        return packed_causal_attention(query, key, value, tuple(cu_seqlens.tolist()), scale=self.scale).flatten(1)
