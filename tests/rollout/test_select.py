"""`rollout.engine` names an engine."""

import pytest

from rlhf.errors import ConfigError
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.select import engine_factory


def made_elsewhere() -> None:
    """Stands for another engine's factory."""


def test_native_and_import_paths_are_found():
    assert engine_factory("native") is NativeEngine
    assert engine_factory("tests.rollout.test_select:made_elsewhere") is made_elsewhere


def test_wrong_paths_are_refused_with_what_is_missing():
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        engine_factory("nowhere.at_all:make")
    with pytest.raises(ConfigError, match="has no 'make' to call"):
        engine_factory("tests.rollout.test_select:make")
