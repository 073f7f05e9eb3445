"""Rules report through one door, which raises or collects."""

import ast
from pathlib import Path

import pytest

from rlhf.config.algorithm import PPOConfig
from rlhf.config.checks import Faults, at_least, collecting, noted, one_of, refuse
from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.errors import ConfigError, DataError, LayoutError

CONFIG = Path(__file__).resolve().parents[2] / "rlhf" / "config"


def keys(faults: Faults) -> list[str]:
    return [fault.key for fault in faults.found]


def test_a_rule_raises_at_once_outside_and_is_noted_inside() -> None:
    with pytest.raises(ConfigError, match=r"^a: 0 given; needs at least 1; set a=1$"):
        at_least("a", 0, 1)
    with pytest.raises(LayoutError, match=r"^x: y$"):
        refuse("x: y", LayoutError)
    with collecting() as faults:
        assert not at_least("a", 0, 1)
        assert at_least("b", 1, 1)
        assert not one_of("c", "x", ("y",))
        refuse("d: none", LayoutError)
    assert keys(faults) == ["a", "c", "d"]
    assert faults.found[2].error is LayoutError
    with pytest.raises(ConfigError):
        at_least("a", 0, 1)  # outside again


def test_what_readers_raise_is_noted_with_its_class() -> None:
    with collecting() as faults:
        with noted():
            raise DataError("data.path: gone")
        with pytest.raises(ZeroDivisionError), noted():  # our own bugs are not the user's faults
            _ = 1 / 0
    assert [(fault.message, fault.error) for fault in faults.found] == [("data.path: gone", DataError)]
    with pytest.raises(DataError, match="gone"):
        faults.raise_any("run.yaml")
    with pytest.raises(DataError, match="here"), noted():
        raise DataError("here")


def test_several_faults_are_raised_in_one_message() -> None:
    faults = Faults()
    faults.raise_any("run.yaml")  # nothing
    faults.add("a: 1")
    faults.add("b: 2", DataError)
    with pytest.raises(ConfigError, match=r"^run.yaml: 2 settings cannot work:\n  a: 1\n  b: 2$"):
        faults.raise_any("run.yaml")


@pytest.mark.parametrize(
    ("message", "follows"),
    [
        ("ppo.gamma: again", True),
        ("ppo.x: 3 is above ppo.gamma = 2; lower it", True),
        ("ppo.x: ppo.gamma.", True),
        ("ppo.gamma2: 1", False),
        ("ppo.x: my.ppo.gamma = 1", False),
        ("ppo.x: 2 of num_steps = 1", True),
        ("num_steps: 1", True),
        ("ppo.x: needs num_steps to be small", False),
        ("critic.model.path: 'a' is no folder", True),
    ],
)
def test_a_rule_that_speaks_of_a_doubted_setting_says_nothing_new(message: str, follows: bool) -> None:
    faults = Faults()
    faults.add("ppo.gamma: 'x' given")
    faults.add("num_steps: 'y' given")
    faults.doubt("critic.model")  # a whole section
    with collecting(faults):
        refuse(message)
    assert len(faults.found) == (2 if follows else 3)


def test_rules_after_a_broken_one_do_not_stumble_over_its_value() -> None:
    with collecting() as faults:
        PPOConfig(minibatch_samples=0, epochs=0, clip_eps=0.0)
        RolloutConfig(tp=0, engine="x", kv_cache_tokens=4, sampling=SamplingConfig(top_p=-1.0, temperature=-1.0))
    assert keys(faults) == [
        "ppo.minibatch_samples",
        "ppo.epochs",
        "ppo.clip_eps",
        "sampling.temperature",
        "sampling.top_p",
        "rollout.tp",
        "rollout.engine",
        "rollout.kv_cache_tokens",
    ]


def test_no_rule_of_a_config_class_raises_by_itself() -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in CONFIG.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and function.name.startswith(("__post_init__", "_check"))
        for node in ast.walk(function)
        if isinstance(node, ast.Raise)
    ]
    assert not found, (
        f"call refuse(message) from rlhf.config.checks instead, so that faults are told all at once: {found}"
    )
