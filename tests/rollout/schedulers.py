"""Stand-ins for SGLang's schedulers: modules with its parameters, served by threads of this process."""

import threading
from collections.abc import Sequence

import torch

from rlhf.families.spec import ModelSpec
from rlhf.rollout.sglang.layout import Sizes, param_shapes
from rlhf.rollout.sglang.weights.loader import ServeTransfer


class _Linear(torch.nn.Module):
    """Something with parameters."""


def model_of(spec: ModelSpec, sizes: Sizes, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A module with the parameters of one of SGLang's ranks, all NaN."""
    model = torch.nn.Module()
    for name, shape in param_shapes(spec, sizes).items():
        *path, leaf = name.split(".")
        at = model
        for step in path:
            if step not in dict(at.named_children()):
                at.add_module(step, _Linear())
            at = getattr(at, step)
        at.register_parameter(leaf, torch.nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False))
    return model


class ThreadPort:
    """An engine whose schedulers are threads; the errands of its ranks run side by side."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.models = models
        self.num_updates = 0

    def begin_update(self) -> None:
        self.num_updates += 1

    def load_window(self, errands: Sequence[ServeTransfer]) -> None:
        threads = [
            threading.Thread(target=errand.run, args=(model,), daemon=True)
            for errand, model in zip(errands, self.models, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
