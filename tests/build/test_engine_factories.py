"""What engines of other packages must say of themselves."""

import pytest

from rlhf.build.engine_factories import check_tail
from rlhf.config.rollout import RolloutConfig
from rlhf.errors import ConfigError


class Forgetful:
    """Does not say that it goes on with begun responses."""


class Able:
    continues = True


def settings(engine: str, tail: str = "continue") -> RolloutConfig:
    return RolloutConfig(engine=engine, tail=tail, oversample=0.5)


def test_partial_responses_are_refused_to_engines_that_do_not_say_they_go_on_with_them() -> None:
    with pytest.raises(ConfigError, match=r"rollout.tail: continue given, but tests.build.test_engine_factories:Forg"):
        check_tail(settings("tests.build.test_engine_factories:Forgetful"))
    check_tail(settings("tests.build.test_engine_factories:Forgetful", tail="drop"))
    for engine in ("native", "sglang", "tests.build.test_engine_factories:Able"):
        check_tail(settings(engine))
