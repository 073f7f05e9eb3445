"""What the actor's weights send to the engines: all at first, then what training can change, nothing twice."""

from contextlib import nullcontext

import pytest

from rlhf.errors import EngineLostError
from rlhf.reshard.stats import NOTHING_MOVED
from rlhf.trainers.policy_sync import PolicySync


class RecordingSync:
    """Takes note of what each transfer is told has changed."""

    def __init__(self) -> None:
        self.changed: list[object] = []
        self.forgotten = 0

    def update_weights(self, src_params, dst_params, *, changed):
        self.changed.append(changed)
        return NOTHING_MOVED

    def forget(self) -> None:
        self.forgotten += 1


def test_one_version_is_sent_once_and_frozen_tensors_are_left_to_the_first_transfer():
    sync = RecordingSync()
    policy = PolicySync(sync, actor_params=dict, engine=None, trained=("w",))
    for version in (4, 4, 5, 5, 6):
        policy.update_weights(policy_version=version)
    assert sync.changed == [("w",), (), ("w",), (), ("w",)]  # the transfer itself makes its first one complete
    policy.forget()
    assert sync.forgotten == 1


def test_all_is_sent_where_nothing_is_said_of_training():
    sync = RecordingSync()
    policy = PolicySync(sync, actor_params=dict, engine=None)
    policy.update_weights(policy_version=0)
    assert sync.changed == [None]


def test_ranks_outside_both_pools_pass_through():
    assert PolicySync(None, actor_params=dict, engine=None).update_weights(policy_version=0) is None


class RecordingEngine:
    """Takes note of what it is asked, and may be lost."""

    def __init__(self, log: list[str], *, lost: bool = False) -> None:
        self.log, self.lost = log, lost

    def params(self) -> dict[str, object]:
        self.log.append("params")
        return {}

    def wake_weights(self) -> None:
        self.log.append("wake_weights")
        if self.lost:
            raise EngineLostError("engine_0: it died")

    def weights_updated(self, policy_version: int) -> None:
        self.log.append(f"weights_updated {policy_version}")

    def wake(self) -> None:
        self.log.append("wake")


def test_an_engine_wakes_its_weights_before_the_transfer_and_its_cache_after_it():
    log: list[str] = []
    PolicySync(RecordingSync(), actor_params=dict, engine=RecordingEngine(log)).update_weights(policy_version=3)
    assert log == ["wake_weights", "params", "weights_updated 3", "wake"]


def test_a_lost_engine_takes_part_in_the_transfer_only_where_losses_are_survived():
    for survives, wanted in (
        (False, ["wake_weights"]),
        (True, ["wake_weights", "params", "weights_updated 3", "wake"]),
    ):
        log: list[str] = []
        engine = RecordingEngine(log, lost=True)
        policy = PolicySync(RecordingSync(), actor_params=dict, engine=engine, survives_loss=survives)
        with nullcontext() if survives else pytest.raises(EngineLostError):
            policy.update_weights(policy_version=3)
        assert log == wanted  # a real one raises from its sink on
