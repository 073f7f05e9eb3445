"""Fault: unfused rotary embedding of packed sequences works in a Python loop over the sequences, in every layer."""

import torch
from megatron.core.models.common.embeddings.rope_utils import _rotate_half
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_patches.patch import Patch


def positions_of(cu_seqlens: Tensor) -> Tensor:
    """Position of each packed token in its own sequence, int64 [T]."""
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - starts
    return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) - torch.repeat_interleave(starts, lengths)


def _apply_packed_rope(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Rotate t [T, H, D] by freqs [L, 1, 1, D]: sine and cosine once for each position, then one gather."""
    assert not rotary_interleaved, "interleaved rotary embedding is not built here"
    assert not multi_latent_attention, "multi-latent attention is not built here"
    assert cp_group is None or cp_group.size() == 1, "context parallelism is not built here"
    assert freqs.shape[-1] == t.shape[-1], "partial rotary embedding is not built here"
    positions = positions_of(cu_seqlens)
    cos = (freqs.squeeze(1).cos() * mscale).to(t.dtype).index_select(0, positions)
    sin = (freqs.squeeze(1).sin() * mscale).to(t.dtype).index_select(0, positions)
    return t * cos + _rotate_half(t, rotary_interleaved) * sin


PATCH = Patch(
    target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    source_sha="45c1da33b8ab",
    replacement=_apply_packed_rope,
    why="splits, slices and concatenates once a sequence, twice a layer, and takes sine and cosine of every token",
    drop_when="upstream gathers by position, or fused rotary embedding runs without Transformer Engine",
)
