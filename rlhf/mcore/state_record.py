"""What a model's and an optimizer's state has beside tensors: counts, and what the model is, as JSON."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from rlhf.errors import CheckpointError
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.optimizer import Optimizer


def model_record(model: MegatronModel, optimizer: Optimizer | None) -> dict[str, Any]:
    """Counts of a model's optimizer and the numbers that say what model it is; only values that JSON has.

    The same on all ranks of the pool. The learning rate needs no entry: it follows from `steps_done` and the config.
    """
    record: dict[str, Any] = {"model": _identity(model), "parallel": asdict(model.parallel)}
    if optimizer is not None:
        record["optimizer"] = {
            "steps_done": optimizer.steps_done,
            "steps_skipped": optimizer.steps_skipped,
            "adam_step": _adam_step(optimizer),
        }
    return record


def check_record(model: MegatronModel, record: Mapping[str, Any], *, where: str) -> None:
    """Refuse the state of another model; the layout may differ.

    Raises:
        CheckpointError: It names each number that differs.
    """
    found, ours = _flat(record.get("model", {})), _flat(_identity(model))
    differing = [
        f"{name} is {found.get(name)!r}, here {ours.get(name)!r}"
        for name in sorted({*found, *ours})
        if found.get(name) != ours.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{where}: holds another model: {'; '.join(differing)}; needs the model of this run; "
            "correct the run's model section, or start a new run"
        )


def restore_record(model: MegatronModel, optimizer: Optimizer, record: Mapping[str, Any], *, where: str) -> None:
    """Take over the counts. Local; after moments, masters and weights were read.

    Raises:
        CheckpointError: The record is of another model or of one without an optimizer.
    """
    check_record(model, record, where=where)
    counts = record.get("optimizer")
    if counts is None:
        raise CheckpointError(f"{where}: has no optimizer state; needs that of a trained model; train from its weights")
    optimizer.steps_done = counts["steps_done"]
    optimizer.steps_skipped = counts["steps_skipped"]
    for adam in _adams(optimizer):
        if not isinstance(adam, torch.optim.AdamW):
            for group in adam.param_groups:
                group["step"] = counts["adam_step"]
            continue
        for state in adam.state.values():
            state["step"].fill_(counts["adam_step"])


def _adam_step(optimizer: Optimizer) -> int:
    """What Adam's bias correction goes by: the same for all weights."""
    found = {optimizer.steps_done}
    for adam in _adams(optimizer):
        if isinstance(adam, torch.optim.AdamW):
            found |= {int(state["step"]) for state in adam.state.values() if "step" in state}
        else:
            found |= {int(group["step"]) for group in adam.param_groups if group["params"] and "step" in group}
    assert len(found) == 1, f"optimizer: weights differ in their number of steps: {sorted(found)}"
    return found.pop()


def _adams(optimizer: Optimizer) -> Iterable[torch.optim.Optimizer]:
    return (part.optimizer for part in optimizer.megatron.chained_optimizers if not part.is_stub_optimizer)


def _identity(model: MegatronModel) -> dict[str, Any]:
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    return {**asdict(model.spec), "head": model.head.value, "dtype": dtype}


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entries.items():
        found.update(_flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return found
