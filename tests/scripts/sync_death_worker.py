"""rlhf.train, but one rank dies in the middle of a weight sync: between two buckets, its peers waiting for the rest.

RLHF_TEST_DEATH="1" scripts/launch.sh --module tests.scripts.sync_death_worker CONFIG
"""

import os
import signal
import sys
import time

from rlhf import train
from rlhf.reshard.transport import GroupTransport

DEADLY_POST = 3

_post = GroupTransport.post


def _deadly_post(self, receives, sends):
    if os.environ["RANK"] == os.environ["RLHF_TEST_DEATH"]:
        GroupTransport.posts = getattr(GroupTransport, "posts", 0) + 1
        if GroupTransport.posts == DEADLY_POST:
            time.sleep(1.0)  # the phase gets on record, as it does when phases last longer than a beat
            print("dies between two buckets", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    return _post(self, receives, sends)


if __name__ == "__main__":
    GroupTransport.post = _deadly_post
    sys.exit(train.main(sys.argv[1:]))
