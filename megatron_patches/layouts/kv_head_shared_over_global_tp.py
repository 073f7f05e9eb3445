"""Fault: where tp exceeds the number of KV heads, attention asks the global parallel state for tp.

Upstream's way stays: the fused rows are cut evenly, inside a group of heads; the ranks' activations are gathered over
tp and each takes its KV head's. In the backward pass the gather sums what all ranks found for a row and gives the sum
to the row's holder, so shared keys and values get the gradient of all query heads. A rank's part is copied out of the
gathered whole, or the values, a view of it, would keep all heads of all tokens in memory until the backward pass.
"""

from megatron_patches.patch import Edit

EDIT = Edit(
    target="megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
    source_sha="c2416ff2504e",
    changes=(
        (
            "all_gather_last_dim_from_tensor_parallel_region(mixed_qkv)",
            "all_gather_last_dim_from_tensor_parallel_region(mixed_qkv, group=self.tp_group)",
        ),
        ("get_tensor_model_parallel_rank()", "get_pg_rank(self.tp_group)"),
        (
            "mixed_qkv = mixed_qkv[:, :, idx * size : (idx + 1) * size]",
            "mixed_qkv = mixed_qkv[:, :, idx * size : (idx + 1) * size].contiguous()",
        ),
    ),
    why="with more tensor-parallel ranks than KV heads it reads group and rank from parallel_state, not from its own",
    drop_when="get_query_key_value_tensors uses self.tp_group throughout",
)
