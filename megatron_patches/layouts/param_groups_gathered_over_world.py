"""Fault: the optimizer agrees on its parameter groups with every rank of the job, not with the model's ranks."""

from megatron_patches.patch import Edit

_GROUP = "get_attr_wrapped_model(model_chunks[0], 'pg_collection').intra_dist_opt"

EDIT = Edit(
    target="megatron.core.optimizer:_get_param_groups",
    source_sha="cccb88ccace9",
    changes=(
        (
            "    params_key = list(params_map.keys())\n",
            "    from megatron.core.utils import get_attr_wrapped_model\n    params_key = list(params_map.keys())\n",
        ),
        ("torch.distributed.get_world_size()", f"{_GROUP}.size()"),
        (
            "torch.distributed.all_gather_object(gathered_params_key, params_key)",
            f"torch.distributed.all_gather_object(gathered_params_key, params_key, group={_GROUP})",
        ),
    ),
    why="all_gather_object over the world hangs when only the ranks of one model build an optimizer",
    drop_when="_get_param_groups takes a process group",
)
