"""A weight sync as a command line names it: by a run's config, or by a model and two sizes."""

from dataclasses import dataclass
from pathlib import Path

from rlhf.config.load import load_config
from rlhf.config.run import PPORunConfig
from rlhf.config.sync import SyncConfig
from rlhf.errors import ConfigError
from rlhf.families.folder import find_folder
from rlhf.families.published import PUBLISHED, find_published
from rlhf.families.registry import read_spec
from rlhf.families.spec import ModelSpec
from rlhf.preflight.sizes import EngineSizes, read_engines, read_parallel
from rlhf.preflight.transition import ENGINES, Transition
from rlhf.reshard.topology import Fanout

DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Words of the command line; empty where nothing was said."""

    config: tuple[str, ...] = ()
    """CONFIG.yaml [KEY=VALUE ...]; then the rest is about what it leaves open, or changes it."""
    model: str = ""
    src: str = ""
    dst: str = ""
    engine: str = ""
    dtype: str = ""
    fanout: str = ""
    gpus_per_node: int = 8


def transition_of(given: Given) -> Transition:
    """What is to be studied.

    Raises:
        ConfigError: The sizes or the config cannot work, or the model is not known.
        CheckpointError: A model's folder has no config.json that can be read.
    """
    return _of_config(given) if given.config else _of_sizes(given)


def model_names() -> list[str]:
    """Short names that --model takes."""
    return [one.name for one in PUBLISHED]


def _of_sizes(given: Given) -> Transition:
    for name, text in (("--src", given.src), ("--dst", given.dst)):
        if not text:
            raise ConfigError(f"{name}: not given; needs sizes, such as {name} tp8; give them")
    spec = _spec(given.model, where="--model")
    parallel = read_parallel(given.src, spec.num_layers, where="--src")
    return Transition(
        model=given.model,
        spec=spec,
        parallel=parallel,
        engines=read_engines(given.dst, parallel.ranks, where="--dst"),
        engine=given.engine or ENGINES[0],
        dtype=given.dtype or DEFAULT_DTYPE,
        fanout=Fanout(given.fanout or SyncConfig().fanout),
        gpus_per_node=given.gpus_per_node,
        bucket_bytes=SyncConfig().bucket_bytes,
    )


def _of_config(given: Given) -> Transition:
    config = load_config(list(given.config))
    if not isinstance(config, PPORunConfig):
        raise ConfigError(f"{given.config[0]}: trainer {config.trainer} has no engines; needs a run with a rollout")
    spec = _spec(config.actor.model.path, where="actor.model.path")
    parallel, rollout = config.actor.parallel, config.rollout
    if given.src:
        parallel = read_parallel(given.src, spec.num_layers, where="--src")
    ep = rollout.sglang.ep if rollout.engine == "sglang" else 1
    engines = EngineSizes(tp=rollout.tp, dp=rollout.dp, ep=ep, first_rank=rollout.first_rank, stride=rollout.stride)
    if given.dst:
        engines = read_engines(given.dst, parallel.ranks, where="--dst")
    return Transition(
        model=config.actor.model.path,
        spec=spec,
        parallel=parallel,
        engines=engines,
        engine=given.engine or rollout.engine,
        dtype=given.dtype or config.actor.model.dtype,
        fanout=Fanout(given.fanout or config.sync.fanout),
        gpus_per_node=given.gpus_per_node,
        bucket_bytes=config.sync.bucket_bytes,
    )


def _spec(model: str, *, where: str) -> ModelSpec:
    """By its published shapes, or from its folder."""
    if known := find_published(model):
        return known.spec
    folder = find_folder(model)
    if folder is None:
        raise ConfigError(
            f"{where}: {model!r} is neither known here nor a folder; needs a folder with config.json, or one of "
            f"{', '.join(model_names())}"
        )
    return read_spec(Path(folder))
