"""Which phase a second counts in."""

from contextlib import nullcontext

import pytest

from rlhf.config.rollout import RolloutConfig
from rlhf.errors import EngineLostError
from rlhf.metrics.timers import Timers
from rlhf.trainers.phases import Phases
from rlhf.trainers.recovery import Losses, Recovery


def _recovery(engine, on_loss="stop"):
    config = RolloutConfig(on_loss=on_loss)
    return Recovery(config, losses=Losses(config, rank=0, group=None), engine=engine)


def test_an_evaluation_is_no_part_of_the_rollout():
    timers = Timers(clock=iter(range(10)).__next__)
    phases = Phases(timers, engine=None, recovery=_recovery(None))
    with phases.rollout():
        pass
    with phases.evaluation():
        pass
    assert timers.drain() == {"rollout": 1, "evaluate": 1}


class SleepyEngine:
    """Says what it gives back; is lost when told so."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.lost = False

    def sleep(self, *, weights: bool = False) -> int:
        if self.lost:
            raise EngineLostError("engine_0: it died")
        self.asked.append(weights)
        return 1000 + weights


@pytest.mark.parametrize(("sleep", "asked", "freed"), [("none", [], 0), ("kv", [False], 1000), ("all", [True], 1001)])
def test_an_engine_gives_back_what_the_config_says_and_its_weights_are_forgotten(sleep, asked, freed):
    engine, forgotten = SleepyEngine(), []
    recovery = _recovery(engine)
    phases = Phases(Timers(), engine, recovery, sleep=sleep, forget=lambda: forgotten.append(1))
    with phases.rollout():
        assert engine.asked == []
    assert (engine.asked, phases.freed_bytes) == (asked, freed)
    assert len(forgotten) == (sleep == "all")


@pytest.mark.parametrize("on_loss", ["stop", "replace"])
def test_an_engine_that_is_lost_as_it_goes_to_sleep_ends_the_run_or_is_noted(on_loss):
    engine = SleepyEngine()
    recovery = _recovery(engine, on_loss)
    phases, engine.lost = Phases(Timers(), engine, recovery), True
    with pytest.raises(EngineLostError) if on_loss == "stop" else nullcontext(), phases.rollout():
        pass
    assert recovery.is_lost == (on_loss == "replace")
