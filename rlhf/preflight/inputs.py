"""Whether what a run reads is there and fits: models and their layouts, data, functions by name.

Reads headers only and imports no torch: scripts/launch.sh asks it first, then each rank.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from rlhf.config.checks import Faults, noted, refuse
from rlhf.config.data import DataConfig
from rlhf.config.model import FrozenRoleConfig, TrainedRoleConfig
from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.run import PPORunConfig, RunConfig
from rlhf.data.row_files import check_there
from rlhf.families.admissible import check_layout
from rlhf.families.folder import check_whole, find_folder, has_safetensors, resolve_folder
from rlhf.families.frozen import frozen_tensors
from rlhf.families.inherit import inherited_tensors
from rlhf.families.published import find_published
from rlhf.families.registry import logical_tensors, read_spec
from rlhf.families.spec import Head, ModelSpec
from rlhf.rollout.native.layout import check_tp
from rlhf.rollout.sglang.arguments import check_arguments, check_installed
from rlhf.rollout.sglang.cpu import check_cpu_options, check_cpu_sizes
from rlhf.rollout.sglang.layout import Sizes, check_sizes

Role = TrainedRoleConfig | FrozenRoleConfig

_TP_RULES: dict[str, Callable[[ModelSpec, RolloutConfig], None]] = {
    "native": lambda spec, rollout: check_tp(spec, rollout.tp),
    "sglang": lambda spec, rollout: check_sizes(spec, Sizes(rollout.tp, rollout.sglang.ep)),
}
"""Whether an engine's ranks can share the model."""


def check_inputs(
    config: RunConfig, faults: Faults | None = None, *, on_published: Callable[[str, str], None] | None = None
) -> dict[str, ModelSpec]:
    """Whether models and data are there, and the models admit their layouts. No communication.

    Args:
        config: The run.
        faults: What is known to be wrong with it; what hangs on that is not asked.
        on_published: Lets a hub id that is not in the local cache pass by its published shapes, and is told (role,
            hub id). Left out, the checkpoint itself must be there.

    Returns:
        What each role's model is, for the roles whose config.json could be read.

    Raises:
        CheckpointError, LayoutError, ConfigError, DataError: They are not, or they do not; noted instead inside
            `rlhf.config.checks.collecting`.
    """
    faults = faults or Faults()
    specs = {}
    for name, role in roles_of(config).items():
        if faults.doubts(rf"{name}(\.model(\.path)?)?"):
            continue  # what stands there is a stand-in
        with noted():
            known = find_published(role.model.path) if on_published and "/" in role.model.path else None
            if on_published and known and find_folder(role.model.path) is None:
                specs[name] = known.spec
                on_published(name, role.model.path)
            else:
                specs[name] = _checked_folder(name, role, save_hf=config.save_hf)
        if name in specs:
            _check_role(name, role, specs[name], faults)
    if config.data.source in ("jsonl", "parquet"):
        with noted():
            check_there(config.data.source, Path(config.data.path))
    if isinstance(config, PPORunConfig):
        _check_generation(config, specs, faults)
        for name in config.inheritors().keys() & specs.keys() if "actor" in specs else ():
            heads = {"src_head": Head.LM, "dst_head": _head_of(name)}
            inherited_tensors(specs["actor"], specs[name], **heads, where=f"{name}.model.init", source="actor")
    return specs


def _check_role(name: str, role: Role, spec: ModelSpec, faults: Faults) -> None:
    """Whether the model admits its layout, and what training does with it."""
    if not faults.doubts(rf"{name}\.parallel(\..*)?"):
        with noted():
            check_layout(spec, role.parallel, where=f"{name}.parallel")
    if isinstance(role, TrainedRoleConfig) and not faults.doubts(rf"{name}\.freeze"):
        frozen_tensors(spec, role.freeze, head=_head_of(name), where=f"{name}.freeze")


def _head_of(role: str) -> Head:
    return Head.VALUE if role == "critic" else Head.LM


def roles_of(config: RunConfig) -> dict[str, Role]:
    """The roles that are Megatron models."""
    roles: dict[str, Role] = {"actor": config.actor}
    if isinstance(config, PPORunConfig):
        roles |= {"critic": config.critic, "reference": config.reference}
    return roles


def _check_generation(config: PPORunConfig, specs: dict[str, ModelSpec], faults: Faults) -> None:
    actor = specs.get("actor")
    for name, sampling in (("rollout", config.rollout.sampling), ("eval", config.eval.sampling)):
        if actor is not None:
            _check_stop_ids(f"{name}.sampling.stop_token_ids", sampling.stop_token_ids, actor.vocab_size)
        _check_positions(f"{name}.sampling.max_new_tokens", sampling, config.data, specs)
    _check_place("reward.function", config.reward.function)
    if config.rollout.engine == "sglang":
        check_installed(config.rollout.sglang)
        check_arguments(config.rollout.sglang)
        if config.job.device == "cpu":
            check_cpu_options(config.rollout.sglang)
    elif config.rollout.engine != "native":
        _check_place("rollout.engine", config.rollout.engine)
    if actor is not None and config.rollout.engine in _TP_RULES and not faults.doubts(r"rollout\.(tp|sglang\.ep)"):
        with noted():
            _TP_RULES[config.rollout.engine](actor, config.rollout)
            if config.rollout.engine == "sglang" and config.job.device == "cpu":
                check_cpu_sizes(actor, Sizes(config.rollout.tp, config.rollout.sglang.ep))


def _checked_folder(name: str, role: Role, *, save_hf: str) -> ModelSpec:
    folder = resolve_folder(role.model.path, where=f"{name}.model.path")
    spec = read_spec(folder)
    if role.model.init == "checkpoint":
        with noted():
            if has_safetensors(folder):
                check_whole(folder, logical_tensors(spec, head=_head_of(name)))
            else:
                from rlhf.checkpoint.convert.load import check_stored  # noqa: PLC0415  # it imports Megatron

                check_stored(folder, spec)
    if save_hf and Path(save_hf).resolve() == folder.resolve():
        refuse(
            f"save_hf: {save_hf} is the folder of {name}.model.path, which it would overwrite; needs another; change it"
        )
    return spec


def _check_stop_ids(where: str, given: tuple[int, ...], vocab_size: int) -> None:
    if beyond := [token for token in given if not 0 <= token < vocab_size]:
        refuse(
            f"{where}: {beyond} given; the actor's vocabulary has 0..{vocab_size - 1}, so nothing would stop there; "
            "needs ids of the actor's tokenizer; change it"
        )


def _check_positions(where: str, sampling: SamplingConfig, data: DataConfig, specs: dict[str, ModelSpec]) -> None:
    longest = data.max_prompt_tokens + sampling.max_new_tokens
    for role, spec in specs.items():
        if longest > spec.max_length:
            limit = "was made for" if spec.max_length == spec.max_positions else "has a sliding window of"
            refuse(
                f"{where}: {sampling.max_new_tokens} after data.max_prompt_tokens = {data.max_prompt_tokens} make "
                f"{longest} positions; the {role}'s model {limit} {spec.max_length}; lower one of the two"
            )


def _check_place(where: str, location: str) -> None:
    """Whether there is such a file or package; what is in it is for those who import it to find out."""
    place = location.rpartition(":")[0]
    is_file = place.endswith(".py")
    if Path(place).is_file() if is_file else _is_package(place.partition(".")[0]):
        return
    refuse(
        f"{where}: {location} cannot be loaded (there is no {place}); needs package.module:name"
        f"{' or path/to/file.py:name' if where == 'reward.function' else ''}; change it"
    )


def _is_package(name: str) -> bool:
    return bool(name) and importlib.util.find_spec(name) is not None
