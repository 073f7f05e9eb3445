"""When a run is saved, and which settings of that cannot go together."""

import pytest

from rlhf.config.checkpoint import CheckpointConfig
from rlhf.errors import ConfigError


def test_a_step_is_saved_when_the_interval_divides_it_and_never_without_one():
    config = CheckpointConfig(every_steps=3, save_hf_every=2)
    assert [step for step in range(1, 8) if config.due(step)] == [3, 6]
    assert [step for step in range(1, 8) if config.export_due(step)] == [2, 4, 6]
    assert not any(CheckpointConfig().due(step) or CheckpointConfig().export_due(step) for step in range(8))


def test_steps_to_keep_are_steps_that_are_saved():
    assert CheckpointConfig(every_steps=5, keep_every=20).keep_every == 20
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_every: 12 is no multiple of .*every_steps = 5"):
        CheckpointConfig(every_steps=5, keep_every=12)


@pytest.mark.parametrize("change", [{"every_steps": -1}, {"keep_last": 0}, {"resume": " "}])
def test_what_no_run_can_do_is_refused(change):
    with pytest.raises(ConfigError, match=f"checkpoint.{next(iter(change))}"):
        CheckpointConfig(**change)


def test_the_last_export_must_not_replace_those_of_single_steps(tmp_path):
    config = CheckpointConfig(save_hf_every=2)
    config.check_export(str(tmp_path / "model"), tmp_path / "run")
    config.check_export("", tmp_path / "run")
    CheckpointConfig().check_export(str(tmp_path / "run" / "hf"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"save_hf: .* would replace them"):
        config.check_export(str(tmp_path / "run" / "hf"), tmp_path / "run")
