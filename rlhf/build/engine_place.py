"""Where an engine outside training runs: a device by its name, and the ranks that share it."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.config.rollout import RolloutConfig
from rlhf.errors import ConfigError


def device_named(name: str) -> torch.device:
    """The device that a person means; `auto` is a GPU where there is one.

    Raises:
        ConfigError: torch knows no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"open_engine: device = {name!r} given; needs cpu, cuda or cuda:N; change it") from error


def ranks_of_engine(config: RolloutConfig) -> ProcessGroup | None:
    """The ranks that share the engine, as a gloo group; None where this process has one of its own. Collective."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1 or config.tp == 1:
        if config.tp > 1 and config.engine != "sglang":
            raise ConfigError(
                f"open_engine: tp = {config.tp} in one process; the {config.engine} engine needs a rank for each; "
                f"start the script with torchrun --nproc-per-node {config.tp} and call "
                'torch.distributed.init_process_group("gloo") first, or take engine="sglang"'
            )
        return None
    if size != config.tp:
        raise ConfigError(
            f"open_engine: tp = {config.tp}, but torch.distributed has {size} ranks; needs as many; change one"
        )
    return dist.new_group(backend="gloo")


def device_group_of(config: RolloutConfig) -> ProcessGroup:
    """The same ranks, for tensors on GPUs. Collective over the job."""
    return dist.new_group(list(range(config.tp)), backend="nccl")
