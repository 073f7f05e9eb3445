"""Rollout engines by name. Imports nothing of Megatron."""

import importlib
from collections.abc import Mapping
from typing import cast

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
