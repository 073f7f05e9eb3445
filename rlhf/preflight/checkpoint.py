"""Bytes of a training checkpoint: on disk, and what one rank writes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rlhf.config.checkpoint import CheckpointConfig
from rlhf.families.registry import logical_tensors
from rlhf.mcore.memory import model_bytes
from rlhf.preflight.roles import ModelRole
from rlhf.preflight.text import gib, table
from rlhf.reshard.layout import ITEM_BYTES

_MOMENT_BYTES, _MASTER_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBytes:
    """Of one trained role."""

    role: str
    weights: int
    optimizer: int
    """Both moments of what is trained, and fp32 masters of bf16 weights."""
    of_rank: int
    """Most that one of its ranks writes, and with an asynchronous save keeps a copy of in host memory; padding of its
    share of the optimizer's state is counted."""


def saved_bytes(roles: Sequence[ModelRole]) -> list[SavedBytes]:
    """Of the trained roles; layouts must be admissible."""
    return [_of_role(role) for role in roles if role.is_trained]


def _of_role(role: ModelRole) -> SavedBytes:
    item = ITEM_BYTES[role.config.model.dtype]
    state = _MOMENT_BYTES + (_MASTER_BYTES if item < _MASTER_BYTES else 0)
    sizes = {tensor.name: prod(tensor.shape) for tensor in logical_tensors(role.spec, head=role.head)}
    fixed = sum(size for name, size in sizes.items() if name in role.frozen)
    return SavedBytes(
        role=role.name,
        weights=sum(sizes.values()) * item,
        optimizer=(sum(sizes.values()) - fixed) * state,
        of_rank=max(_of_stage(role, stage, item, state) for stage in range(role.config.parallel.pp)),
    )


def _of_stage(role: ModelRole, stage: int, item: int, state: int) -> int:
    """A rank writes the weights that it updates, and its even part of those that are frozen."""
    parallel = role.config.parallel
    held = model_bytes(
        role.spec,
        parallel,
        head=role.head,
        dtype=role.config.model.dtype,
        trainable=True,
        stage=stage,
        frozen=role.frozen,
    )
    updated = held.optimizer // state
    frozen_bytes = held.weights - held.gradients // 4 * item
    return updated * (item + state) + -(-frozen_bytes // parallel.dp)


def render_checkpoint(saved: Sequence[SavedBytes], config: CheckpointConfig) -> str:
    """A table, and what it comes to with the run's settings."""
    rows = [["role", "weights", "optimizer", "a rank writes at most"]]
    rows += [[one.role, gib(one.weights), gib(one.optimizer), gib(one.of_rank)] for one in saved]
    whole = sum(one.weights + one.optimizer for one in saved)
    when = f"every {config.every_steps} steps and on a stop request" if config.every_steps else "on a stop request only"
    kept = f"the newest {config.keep_last}" + (f" and each {config.keep_every}th" if config.keep_every else "")
    return "\n".join(
        [
            f"one checkpoint: {gib(whole)}; saved {when}; {kept} stay, so "
            f"{gib(whole * (config.keep_last + 1))} of disk while one is written",
            *table(rows),
        ]
    )
