"""Rollout engines by name. Imports nothing of Megatron."""

import importlib
from collections.abc import Mapping
from typing import cast

from rlhf.config.checks import refuse
from rlhf.config.rollout import RolloutConfig
from rlhf.errors import ConfigError
from rlhf.rollout.engine import EngineFactory
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.sglang.engine import SGLangEngine

ENGINES: Mapping[str, EngineFactory] = {"native": NativeEngine, "sglang": SGLangEngine}


def engine_factory(name: str) -> EngineFactory:
    """What makes the engine that `rollout.engine` names.

    Raises:
        ConfigError: It cannot be imported.
    """
    if name in ENGINES:
        return ENGINES[name]
    module, _, attribute = name.partition(":")
    try:
        return cast(EngineFactory, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"rollout.engine: {name} cannot be loaded ({error}); needs package.module:factory; change it"
        ) from error


def check_tail(rollout: RolloutConfig) -> None:
    """Refuse rollout.tail = continue where engines of another package do not say that they can.

    Raises:
        ConfigError: See above, or the engine cannot be imported.
    """
    if rollout.tail == "continue" and not getattr(engine_factory(rollout.engine), "continues", False):
        refuse(
            f"rollout.tail: continue given, but {rollout.engine} does not say that its engines go on with responses "
            "that were begun; needs a factory with continues = True; set rollout.tail=drop, or teach the engine"
        )
