"""Fault: tokens of experts that several ranks share are gathered and summed in pieces of different sizes.

NCCL does that; gloo wants equal sizes. With the edits a ragged all-gather is a broadcast from each rank in turn, a
ragged reduce-scatter an all-to-all and a sum in the order of the ranks.
"""

from megatron_patches.patch import Edit

_WHY = "all_gather and reduce_scatter of gloo want the same size from each rank"
_DROP_WHEN = "gloo takes pieces of different sizes"

EDITS = (
    Edit(
        target="megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
        source_sha="44633fe36d60",
        changes=(
            (
                "        torch.distributed.all_gather(output_tensor_list, input_, group=group)\n",
                "        output_tensor_list[group.rank()].copy_(input_)\n"
                "        for source, part in enumerate(output_tensor_list):\n"
                "            if part.numel():\n"
                "                torch.distributed.broadcast(part, group=group, group_src=source)\n",
            ),
        ),
        why=_WHY,
        drop_when=_DROP_WHEN,
    ),
    Edit(
        target="megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
        source_sha="7322068fab71",
        changes=(
            (
                "        torch.distributed.reduce_scatter(output, input_tensor_list, group=group)\n",
                "        received = output.new_empty((world_size, *output.shape))\n"
                "        torch.distributed.all_to_all_single(\n"
                "            received.flatten(0, 1),\n"
                "            input_.contiguous(),\n"
                "            output_split_sizes=[output.shape[0]] * world_size,\n"
                "            input_split_sizes=input_split_sizes,\n"
                "            group=group,\n"
                "        )\n"
                "        torch.sum(received, 0, out=output)\n",
            ),
        ),
        why=_WHY,
        drop_when=_DROP_WHEN,
    ),
)
"""All-gather and reduce-scatter along the first dim."""
