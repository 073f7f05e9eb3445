"""Which phase a second counts in."""

from rlhf.config.algorithm import PPOConfig
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


def test_versions_of_the_policy_count_the_steps_that_train_the_actor():
    config = PPOConfig(critic_warmup_steps=2)
    assert [config.policy_version(done) for done in range(5)] == [0, 0, 0, 1, 2]
