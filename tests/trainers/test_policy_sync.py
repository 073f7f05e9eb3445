"""What the actor's weights send to the engines: all at first, then what training can change, nothing twice."""

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
