"""Reading a run's settings: a YAML file, then `a.b=c` overrides, checked before anything else happens."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf.config.checks import Faults
from rlhf.config.convert import Converter
from rlhf.config.help import help_text
from rlhf.config.nearest import unknown_key
from rlhf.config.run import PPORunConfig, RunConfig, SFTRunConfig
from rlhf.config.schema import default_tree, keys_of, plain
from rlhf.errors import ConfigError

TRAINERS: dict[str, type[PPORunConfig] | type[SFTRunConfig]] = {"ppo": PPORunConfig, "sft": SFTRunConfig}
KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def load_config(argv: Sequence[str]) -> RunConfig:
    """The settings of a run from `[CONFIG.yaml, "a.b=c", ...]`; `trainer` in them picks the kind of run.

    Values may refer to others, defaults included: `critic.model.path: ${actor.model.path}`. With --help or -h the
    usage and every key are written to stdout.

    Raises:
        ConfigError: The file, an override, a key or a value cannot work; every fault found is in the message.
        SystemExit: Code 0, after --help.
    """
    config, faults = read_config(argv)
    faults.raise_any(argv[0])
    return config


def read_config(argv: Sequence[str]) -> tuple[RunConfig, Faults]:
    """As load_config, but with the faults of overrides, keys and values beside the settings instead of raised.

    A setting with a fault holds its default or a stand-in, so that what depends on other settings can still be asked.

    Raises:
        ConfigError: There is no YAML file, or no trainer in it: nothing more can be known.
        SystemExit: Code 0, after --help.
    """
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(help_text(TRAINERS))
        raise SystemExit(0)
    if not argv:
        raise ConfigError("command line: no config file; needs CONFIG.yaml [KEY=VALUE ...]; see --help")
    file, overrides = argv[0], argv[1:]
    if "=" in file and not Path(file).exists():
        raise ConfigError(f"command line: override {file!r} comes first; needs CONFIG.yaml before it; see --help")
    faults, given = Faults(), _read(Path(file))
    changes = _parse(overrides, faults)
    try:
        cls = _run_class(given, changes)
    except ConfigError as error:
        faults.add(str(error))
        faults.raise_any(file)
        raise
    return _convert(cls, _combine(cls, given, changes, faults), faults), faults


def to_yaml(config: RunConfig) -> str:
    """The settings as YAML, every key with its value; load_config reads it back to an equal config."""
    tree = _escaped(plain(config))
    assert isinstance(tree, dict), "a section is a dict"
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def _read(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; needs a YAML file; give the path of one, such as configs/quickstart/ppo.yaml"
        )
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}; needs YAML; mend that line") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds a list; needs a mapping of keys; see --help for the keys")
    return {str(key): value for key, value in found.items()}


def _parse(overrides: Sequence[str], faults: Faults) -> list[tuple[str, DictConfig]]:
    """Each override as (its key, its tree)."""
    parsed = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not KEY.fullmatch(key):
            faults.add(f"{text}: not an override; needs KEY=VALUE, such as ppo.clip_eps=0.1; write it so")
            continue
        try:
            parsed.append((key, OmegaConf.from_dotlist([text if value else f"{key}=''"])))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            reason = " ".join(str(error).split())
            faults.add(f"{key}: {value!r} is not YAML ({reason}); needs a value; put quotes inside the shell's")
    return parsed


def _run_class(
    given: dict[str, object], changes: list[tuple[str, DictConfig]]
) -> type[PPORunConfig] | type[SFTRunConfig]:
    trainer = given.get("trainer")
    for _, tree in changes:
        trainer = tree.get("trainer", trainer)
    words = " or ".join(TRAINERS)
    if trainer is None:
        raise ConfigError(f"trainer: missing; needs {words}; set trainer=ppo")
    if not isinstance(trainer, str) or trainer not in TRAINERS:
        raise ConfigError(f"trainer: {trainer!r} given; needs {words}; change it")
    return TRAINERS[trainer]


def _overlay(defaults: dict[str, object], given: dict[str, object]) -> dict[str, object]:
    """Given values over the defaults; a section that is there but empty keeps its defaults."""
    result = dict(defaults)
    for key, value in given.items():
        below = defaults.get(key)
        if isinstance(below, dict) and below and isinstance(value, dict):
            result[key] = _overlay(below, value)
        elif not (isinstance(below, dict) and value is None):
            result[key] = value
    return result


def _combine(cls: type, given: dict[str, object], changes: list[tuple[str, DictConfig]], faults: Faults) -> DictConfig:
    tree = OmegaConf.create(_overlay(default_tree(cls), given))
    for key, change in changes:
        try:
            merged = OmegaConf.merge(tree, change)
            assert isinstance(merged, DictConfig), "a mapping merged into a mapping is one"
            tree = merged
        except TypeError:  # a list where a section stands, or the reverse: put it there, for the converter to refuse
            OmegaConf.update(tree, key, OmegaConf.select(change, key), merge=False)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            faults.add(f"{key}: {reason}; needs a value that can be merged into the file; change it")
    return tree


def _convert(cls: type[PPORunConfig] | type[SFTRunConfig], tree: DictConfig, faults: Faults) -> RunConfig:
    valid = _paths(cls)
    others = {path for other in TRAINERS.values() if other is not cls for path in _paths(other)}
    config = Converter(lambda path: unknown_key(path, valid, others), faults).section(cls, tree, "")
    assert isinstance(config, cls), "a tree gives a config"
    return config


def _paths(cls: type) -> tuple[str, ...]:
    """Dotted paths of all keys and sections, each once."""
    paths: dict[str, None] = {}
    for key in keys_of(cls):
        parts = key.path.split(".")
        paths.update(dict.fromkeys(".".join(parts[: n + 1]) for n in range(len(parts))))
    return tuple(paths)


def _escaped(value: object) -> object:
    """Text that looks like an interpolation is marked as plain."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", value) if isinstance(value, str) else value
