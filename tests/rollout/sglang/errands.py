"""Errands that tests send to SGLang's schedulers: each runs there, on that scheduler's shard of the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
class Storages:
    """Bytes of all parameters, and of all buffers."""

    def run(self, model: torch.nn.Module) -> tuple[int, int]:
        params, buffers = (
            sum(one.untyped_storage().nbytes() for one in tensors) for tensors in (model.parameters(), model.buffers())
        )
        return params, buffers


@dataclass(frozen=True)
class Fails:
    """Raises."""

    def run(self, model: torch.nn.Module) -> None:
        raise ValueError("no such window")


@dataclass(frozen=True)
class FailsOn:
    """Raises on one rank."""

    tp_rank: int

    def run(self, model: torch.nn.Module) -> None:
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().tp_rank == self.tp_rank:
            raise ValueError("as asked")


@dataclass(frozen=True)
class Hangs:
    """Never comes back."""

    def run(self, model: torch.nn.Module) -> None:
        import time

        time.sleep(3600)


@dataclass(frozen=True)
class HangsOn:
    """Never comes back on one rank."""

    tp_rank: int

    def run(self, model: torch.nn.Module) -> None:
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().tp_rank == self.tp_rank:
            Hangs().run(model)


@dataclass(frozen=True)
class Poison:
    """Make every element of every parameter NaN; returns how many there are."""

    def run(self, model: torch.nn.Module) -> int:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(torch.nan)
        return sum(param.numel() for param in model.parameters())


@dataclass(frozen=True)
class Built:
    """SGLang's own model of a config, as one rank of an engine of these sizes has it, filled by SGLang's own loader.

    Every element of the checkpoint has a value of its own (`full_tensors`).
    """

    config: dict[str, object]
    shapes: dict[str, tuple[int, ...]]
    """By the names of hub checkpoints."""
    tp: int
    ep: int
    rank: int

    def run(self, model: torch.nn.Module) -> bytes:
        """Pickled parameters: between processes that share no key, tensors do not travel by themselves."""
        import pickle
        from types import SimpleNamespace

        import transformers
        from sglang.srt.models.registry import ModelRegistry
        from sglang.srt.runtime_context import get_parallel

        from tests.reshard.toy import full_tensors

        def group(rank: int, size: int) -> SimpleNamespace:
            """Of a rank that talks to nobody."""
            ends = {"is_first_rank": rank == 0, "is_last_rank": rank == size - 1}
            return SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=None, device_group=None, **ends)

        kind, _ = ModelRegistry.resolve_model_cls(self.config["architectures"])
        moe_tp = self.tp // self.ep
        places = {
            "pp": (0, 1),
            "tp": (self.rank, self.tp),
            "attn_tp": (self.rank, self.tp),
            "moe_ep": (self.rank // moe_tp, self.ep),
            "moe_tp": (self.rank % moe_tp, moe_tp),
        }
        parts = {f"{axis}_rank": rank for axis, (rank, _) in places.items()}
        parts |= {f"{axis}_size": size for axis, (_, size) in places.items()}
        parts |= {f"{axis}_group": group(*place) for axis, place in places.items()}
        with get_parallel().override(**parts):
            made = kind(transformers.AutoConfig.for_model(**self.config))
            for param in made.parameters():
                param.data.fill_(torch.nan)
            made.load_weights(full_tensors(self.shapes).items())
        return pickle.dumps({name: param.detach().clone() for name, param in made.named_parameters()})


@dataclass(frozen=True)
class CountSteps:
    """An errand: from now on forward passes take no less than `step_s`, and are counted, with the rows in them."""

    step_s: float

    def run_in(self, scheduler: Any) -> None:
        import time

        run_batch = scheduler.run_batch
        scheduler.counted = []

        def slowly(batch: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = run_batch(batch, *args, **kwargs)
            time.sleep(max(0.0, began + self.step_s - time.monotonic()))
            scheduler.counted.append((len(batch.reqs), len(scheduler.waiting_queue)))
            return result

        scheduler.run_batch = slowly


@dataclass(frozen=True)
class Counted:
    """An errand: rows in each forward pass since the last one, and rows that waited; whether any runs or waits now."""

    def run_in(self, scheduler: Any) -> tuple[list[int], list[int], bool]:
        counted, scheduler.counted = scheduler.counted, []
        return [rows for rows, _ in counted], [waiting for _, waiting in counted], scheduler.is_fully_idle()
