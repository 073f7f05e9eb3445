"""What can be known to be wrong with a run before anything starts; scripts/launch.sh asks first, then each rank.

    python -m rlhf.preflight --nproc N --nnodes M --module rlhf.train CONFIG [key=value ...]

Prints `world_size` and `run_folder` on a line each and makes the folder. Exit 2 and a message for a bad configuration.
Reads config files and headers only and imports no torch, so that a mistake is shown within a second or two.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.data import DataConfig
from rlhf.config.load import load_config
from rlhf.config.model import FrozenRoleConfig, TrainedRoleConfig
from rlhf.config.rollout import SamplingConfig
from rlhf.config.run import PPORunConfig, RunConfig, check_world
from rlhf.data.row_files import check_there
from rlhf.dist.exit_record import ExitCode
from rlhf.errors import CheckpointError, ConfigError, DataError, LayoutError
from rlhf.families.admissible import check_layout
from rlhf.families.folder import check_whole, resolve_folder
from rlhf.families.registry import read_spec
from rlhf.families.spec import ModelSpec
from rlhf.rollout.native.layout import check_tp

OUR_PROGRAM = "rlhf.train"


def check_inputs(config: RunConfig) -> None:
    """Whether models and data are there, and the models admit their layouts. No communication.

    Raises:
        CheckpointError, LayoutError, ConfigError, DataError: They are not, or they do not.
    """
    specs = {name: _checked_model(name, role, save_hf=config.save_hf) for name, role in _roles(config).items()}
    if config.data.source != "reasoning_gym":
        check_there(config.data.source, Path(config.data.path))
    if isinstance(config, PPORunConfig):
        for name, sampling in (("rollout", config.rollout.sampling), ("eval", config.eval.sampling)):
            _check_stop_ids(f"{name}.sampling.stop_token_ids", sampling.stop_token_ids, specs["actor"].vocab_size)
            _check_positions(f"{name}.sampling.max_new_tokens", sampling, config.data, specs)
        _check_place("reward.function", config.reward.function)
        if config.rollout.engine == "native":
            check_tp(specs["actor"], config.rollout.tp)
        else:
            _check_place("rollout.engine", config.rollout.engine)


def _roles(config: RunConfig) -> dict[str, TrainedRoleConfig | FrozenRoleConfig]:
    roles: dict[str, TrainedRoleConfig | FrozenRoleConfig] = {"actor": config.actor}
    if isinstance(config, PPORunConfig):
        roles |= {"critic": config.critic, "reference": config.reference}
    return roles


def _checked_model(name: str, role: TrainedRoleConfig | FrozenRoleConfig, *, save_hf: str) -> ModelSpec:
    folder = resolve_folder(role.model.path, where=f"{name}.model.path")
    spec = read_spec(folder)
    check_layout(spec, role.parallel, where=f"{name}.parallel")
    if role.model.init == "checkpoint":
        check_whole(folder)
    if save_hf and Path(save_hf).resolve() == folder.resolve():
        raise ConfigError(
            f"save_hf: {save_hf} is the folder of {name}.model.path, which it would overwrite; needs another; change it"
        )
    return spec


def _check_stop_ids(where: str, given: tuple[int, ...], vocab_size: int) -> None:
    if beyond := [token for token in given if not 0 <= token < vocab_size]:
        raise ConfigError(
            f"{where}: {beyond} given; the actor's vocabulary has 0..{vocab_size - 1}, so nothing would stop there; "
            "needs ids of the actor's tokenizer; change it"
        )


def _check_positions(where: str, sampling: SamplingConfig, data: DataConfig, specs: dict[str, ModelSpec]) -> None:
    longest = data.max_prompt_tokens + sampling.max_new_tokens
    for role, spec in specs.items():
        if longest > spec.max_positions:
            raise ConfigError(
                f"{where}: {sampling.max_new_tokens} after data.max_prompt_tokens = {data.max_prompt_tokens} make "
                f"{longest} positions; the {role}'s model was made for {spec.max_positions}; lower one of the two"
            )


def _check_place(where: str, location: str) -> None:
    """Whether there is such a file or package; what is in it is for those who import it to find out."""
    place = location.rpartition(":")[0]
    is_file = place.endswith(".py")
    if Path(place).is_file() if is_file else importlib.util.find_spec(place.partition(".")[0]) is not None:
        return
    raise ConfigError(
        f"{where}: {location} cannot be loaded (there is no {place}); needs package.module:name"
        f"{' or path/to/file.py:name' if where == 'reward.function' else ''}; change it"
    )


def world_size(config: RunConfig, *, nproc: int, nnodes: int) -> int:
    """Ranks of the job: nproc on each of nnodes hosts, or as many as the pools of the run need when nproc is 0.

    Raises:
        ConfigError: The pools do not fit that many ranks, or they do not divide over the hosts.
    """
    wanted = max(ranks.stop for ranks in config.pools().values())
    world = nproc * nnodes or wanted
    check_world(config, world)
    if world % nnodes:
        raise ConfigError(f"--nnodes: {world} ranks on {nnodes} hosts; needs the same number on each; change one")
    return world


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlhf.preflight", description="Check a run before it starts.")
    parser.add_argument("--nproc", type=int, default=0, help="ranks on each host; 0: as many as the run needs")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts")
    parser.add_argument("--module", default=OUR_PROGRAM, help="program; of another one only the config is checked")
    parser.add_argument("config", nargs=argparse.REMAINDER, help="CONFIG [key=value ...]")
    args = parser.parse_args(argv)
    try:
        config = load_config(args.config)
        world = world_size(config, nproc=args.nproc, nnodes=args.nnodes)
        if args.module == OUR_PROGRAM:
            check_inputs(config)
        run_folder = _make_folder(config)
    except (ConfigError, CheckpointError, LayoutError, DataError) as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.BAD_INPUT)
    sys.stdout.write(f"{world}\n{run_folder}\n")
    return 0


def _make_folder(config: RunConfig) -> Path:
    run_folder = (Path(config.log.folder) / config.name).absolute()
    try:
        (run_folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"log.folder: {run_folder} cannot be made ({error}); needs a place to write; set log.folder=FOLDER"
        ) from error
    return run_folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
