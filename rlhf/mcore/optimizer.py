"""AdamW on Megatron's distributed optimizer: one true global norm, a step that refuses what is not finite."""

from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch.nn.utils import get_total_norm

from rlhf.config.model import OptimConfig
from rlhf.mcore.lr_schedule import learning_rate
from rlhf.mcore.model import MegatronModel

CLIP_EPS = 1e-6
"""Megatron's and torch's, in clip_grad / (norm + CLIP_EPS)."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one step did; the same on every rank of the pool."""

    grad_norm: float
    """Global L2 norm before clipping: tied and replicated parameters count once."""
    clip_factor: float
    """What the gradients were multiplied by; 1 when not clipped."""
    lr: float
    skipped: bool
    """The norm was not finite, or there was nothing to learn from: weights, moments and schedule are as before."""


class Optimizer:
    """Steps of one model's weights.

    It counts its steps, which drives the learning rate; a checkpoint keeps `steps_done` beside Megatron's state.
    """

    def __init__(self, megatron: MegatronOptimizer, config: OptimConfig, *, device: torch.device) -> None:
        self.megatron = megatron
        self.config = config
        self.device = device
        self.steps_done = 0
        self.steps_skipped = 0

    def zero_grad(self) -> None:
        """Forget gradients."""
        self.megatron.zero_grad()

    def weights_changed(self) -> None:
        """Take over weights that were written into the model after the optimizer was built (bf16 masters)."""
        self.megatron.reload_model_params()

    @torch.no_grad()
    def step(self) -> OptimizerStep:
        """Clip by the global norm and update the weights from the gradient buffers. Collective over the pool."""
        lr = learning_rate(self.config, self.steps_done)
        not_finite = self.megatron.prepare_grads()
        norm = self._global_norm()
        if not_finite or not isfinite(norm):
            self.steps_skipped += 1
            self.megatron.zero_grad()
            return OptimizerStep(grad_norm=norm, clip_factor=1.0, lr=lr, skipped=True)
        limit = self.config.clip_grad
        factor = min(1.0, limit / (norm + CLIP_EPS)) if limit > 0 else 1.0
        for group in self.megatron.param_groups:
            group["lr"] = lr
            for parameter in group["params"] if factor < 1.0 else ():
                parameter.grad.mul_(factor)
        self.megatron.step_with_ready_grads()
        self.steps_done += 1
        return OptimizerStep(grad_norm=norm, clip_factor=factor, lr=lr, skipped=False)

    def skip(self) -> OptimizerStep:
        """What `step` would be if there were no gradient, and nothing else; no communication.

        A step by AdamW on a gradient of zeros would move the weights all the same, by its momentum and by decay.
        """
        self.megatron.zero_grad()
        lr = learning_rate(self.config, self.steps_done)
        return OptimizerStep(grad_norm=0.0, clip_factor=1.0, lr=lr, skipped=True)

    def _global_norm(self) -> float:
        """Over this rank's share of the gradients, then over the pool.

        Megatron says which gradients count: a parameter that ranks hold alike counts on one of them.
        """
        parts = self.megatron.chained_optimizers
        grads = [grad for part in parts for grad in part.get_main_grads_for_grad_norm()]
        square = get_total_norm(grads).to(self.device, torch.float64).square()
        dist.all_reduce(square, group=self.megatron.get_grad_stats_parallel_group())
        return float(square.sqrt())


def build_optimizer(model: MegatronModel, optim: OptimConfig) -> Optimizer:
    """Optimizer of a trainable model. Collective over the model's pool; build it after the weights are loaded.

    Parameters with one dim (norms and biases) are not decayed. With bf16 parameters each dp rank holds fp32 masters of
    its share; with fp32 it updates its share in place.
    """
    dtype = model.config.params_dtype
    megatron = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=optim.overlap_param_gather,
            timers=model.config.timers,
        ),
        list(model.chunks),
        use_gloo_process_groups=False,
        pg_collection=model.groups.collection,
    )
    is_torch = any(isinstance(part.optimizer, torch.optim.AdamW) for part in megatron.chained_optimizers)
    for group in megatron.param_groups:
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]  # Megatron leaves this to its LR scheduler
        if is_torch:
            group["fused"] = True  # one pass over memory: 8 times faster on a CPU at 64 M parameters
    return Optimizer(megatron, optim, device=model.device)
