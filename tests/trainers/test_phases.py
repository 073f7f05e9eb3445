"""Which phase a second counts in."""

from rlhf.metrics.timers import Timers
from rlhf.trainers.phases import Phases


def test_an_evaluation_is_no_part_of_the_rollout():
    timers = Timers(clock=iter(range(10)).__next__)
    phases = Phases(timers, engine=None)
    with phases.rollout():
        pass
    with phases.evaluation():
        pass
    assert timers.drain() == {"rollout": 1, "evaluate": 1}
