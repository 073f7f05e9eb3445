"""Errands that tests send to SGLang's schedulers: each runs there, on that scheduler's shard of the model."""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class LoadWhole:
    """Load a checkpoint's file by SGLang's own loader: an independent way to bring weights in."""

    path: Path

    def run(self, model: torch.nn.Module) -> int:
        from safetensors.torch import load_file

        tensors = load_file(self.path)
        model.load_weights(tensors.items())
        return len(tensors)


@dataclass(frozen=True)
class Shapes:
    """What the model's parameters are called and how they look."""

    def run(self, model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(param.shape) for name, param in model.named_parameters()}


@dataclass(frozen=True)
class Fails:
    """Raises."""

    def run(self, model: torch.nn.Module) -> None:
        raise ValueError("no such window")


@dataclass(frozen=True)
class Hangs:
    """Never comes back."""

    def run(self, model: torch.nn.Module) -> None:
        import time

        time.sleep(3600)
