"""The parameters of a built model, by the names of its layout."""

from torch import Tensor

from rlhf.mcore.layout import layers_before
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.param_names import local_name
from rlhf.mcore.param_sync import gather_stale


def local_params(model: MegatronModel) -> dict[str, Tensor]:
    """This rank's parameters by the names of `megatron_layout`, as detached views of their storage.

    They are read as they are: with `optim.overlap_param_gather` stale from a step on (see `current_params`). Ask again
    after the optimizer was built: its buffers may move the storage.
    """
    parallel, found = model.parallel, {}
    before = layers_before(model.spec, parallel, model.groups.pp_rank)
    for module, start in zip(model.modules, before, strict=True):
        found.update({local_name(name, start): param.detach() for name, param in module.named_parameters()})
    return found


def current_params(model: MegatronModel) -> dict[str, Tensor]:
    """`local_params` brought up to date first. Collective over the model's dp axis."""
    gather_stale(model.chunks)
    return local_params(model)
