"""From `rollout.engine` of the config to the factory it names."""

from importlib import import_module

from rlhf.errors import ConfigError
from rlhf.rollout.engine import EngineFactory
from rlhf.rollout.native.engine import NativeEngine


def engine_factory(name: str) -> EngineFactory:
    """`native`, or the factory at import path `package.module:name`.

    Raises:
        ConfigError: There is no such module, or no such name in it.
    """
    if name == "native":
        return NativeEngine
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine: {name!r} cannot be imported ({error}); needs native or MODULE:NAME"
        ) from error
    if not callable(found):
        raise ConfigError(f"rollout.engine: {module} has no {attribute!r} to call; needs MODULE:NAME of a factory")
    return found
