"""Who owns which row follows from numbers alone."""

from rlhf.config.rollout import RolloutConfig
from rlhf.trainers.ownership import Ownership


def test_samples_of_a_prompt_stay_with_the_leader_of_its_engine() -> None:
    ownership = Ownership.of(RolloutConfig(tp=2, dp=3, first_rank=4))
    assert ownership.leaders == (4, 6, 8)
    assert ownership.owners(4, 2) == (4, 4, 6, 6, 8, 8, 4, 4)


def test_only_leaders_lead_an_engine() -> None:
    ownership = Ownership.of(RolloutConfig(tp=2, dp=2))
    assert [ownership.engine_led_by(rank) for rank in range(5)] == [0, None, 1, None, None]
