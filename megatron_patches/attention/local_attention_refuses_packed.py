"""Fault: the core attention used without Transformer Engine refuses packed sequences and copies KV heads for GQA."""

from megatron_patches.attention.sdpa import SDPACoreAttention
from megatron_patches.patch import Patch


def _core_attention(_self: object) -> type[SDPACoreAttention]:
    return SDPACoreAttention


PATCH = Patch(
    target="megatron.core.models.backends:LocalSpecProvider.core_attention",
    source_sha="7c4b4acd52da",
    replacement=_core_attention,
    why="DotProductAttention raises on packed_seq_params, and takes its scratch memory from the global parallel state",
    drop_when="the local spec has a core attention for packed sequences",
)
