"""Fault: the router asks whether Transformer Engine's product is None, a name that only its import binds."""

from megatron_patches.patch import Edit

_FUNCTION = "megatron.core.transformer.moe.moe_utils:RouterGatingLinearFunction"
_SHAS = {"forward": "dcba4f9f02b3", "backward": "222f6d592730"}

EDITS = tuple(
    Edit(
        target=f"{_FUNCTION}.{name}",
        source_sha=sha,
        changes=(("if te_general_gemm is not None", "if HAVE_TE and te_general_gemm is not None"),),
        why="NameError: te_general_gemm is bound by the import of Transformer Engine alone",
        drop_when="the name is None where Transformer Engine is missing",
    )
    for name, sha in _SHAS.items()
)
"""Forward and backward of the router's linear layer."""
