"""Fault: the optimizer tells precisions apart by `Tensor.type() == 'torch.cuda.FloatTensor'` and kin."""

from megatron_patches.patch import Edit

_MODULE = "megatron.core.optimizer"
_CHANGES = (("'torch.cuda.", "'torch."),)
_WHY = "a CPU parameter's type() is 'torch.FloatTensor', so that it falls through or trips an assertion"
_DROP_WHEN = "Megatron-Core's optimizers compare dtypes"

EDITS = tuple(
    Edit(target=f"{_MODULE}.{function}", source_sha=sha, changes=_CHANGES, why=_WHY, drop_when=_DROP_WHEN)
    for function, sha in {
        "distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups": "1b9f0ec06718",
        "clip_grads:clip_grad_by_total_norm_fp32": "8edb9da53650",
    }.items()
)
