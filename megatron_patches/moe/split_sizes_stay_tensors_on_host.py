"""Fault: the token dispatcher's split sizes become numbers only where they are copied from a GPU."""

from megatron_patches.patch import Edit

EDIT = Edit(
    target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
    source_sha="8fc5847a887d",
    changes=(
        (
            "        tensor = cpu_tensor\n    return tensor",
            "        tensor = cpu_tensor\n"
            "    elif as_numpy and torch.is_tensor(tensor):\n"
            "        tensor = tensor.numpy()\n"
            "    return tensor",
        ),
    ),
    why="as_numpy is ignored for a tensor on the host, and all_to_all_single refuses tensors as split sizes",
    drop_when="as_numpy holds wherever the tensor is",
)
