"""A sink that outlives its engine: what it says of the loss. No SGLang is needed."""

import pytest

from rlhf.errors import EngineError, EngineLostError
from rlhf.rollout.sglang.weights.lasting import LastingSink


class Sink:
    """Whose scheduler is gone; `told`: what the engine's host says of that."""

    def __init__(self, told: EngineError | None) -> None:
        self.told = told

    def hand_over(self, number: int) -> None:
        raise EngineLostError("the scheduler of tp rank 0 is gone")

    def give_up(self) -> EngineError | None:
        return self.told


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        (EngineLostError("engine_0: scheduler tp 0 was ended by SIGKILL"), "was ended by SIGKILL"),
        (EngineError("load_window: tp rank 0: ValueError"), "is gone"),  # the host lives, and knows of no loss
        (None, "is gone"),
    ],
)
def test_the_cause_is_what_the_host_knows_of_the_loss_or_else_what_the_rank_saw(told, cause):
    sink = LastingSink(Sink(told))
    sink.hand_over(0)
    assert sink.is_lost
    assert cause in str(sink.cause)
    sink.hand_over(1)  # nobody is asked again
    assert cause in str(sink.cause)
