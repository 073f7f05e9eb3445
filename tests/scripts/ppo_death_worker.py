"""rlhf.train, but one rank dies or stops in the middle of a phase: no outside killer could hit a phase of milliseconds.

    RLHF_TEST_DEATH="1 score/critic SIGKILL" scripts/launch.sh --module tests.scripts.ppo_death_worker CONFIG

The rank sends itself the signal when it ticks in that phase; neither SIGKILL nor SIGSTOP can be handled, so it is the
same as a signal from outside. With a fourth word it sends it, once, to a descendant with that word in its name, as in
"0 rollout/generate SIGKILL sglang::scheduler".
"""

import os
import signal
import sys
import time

import psutil

from rlhf import train
from rlhf.dist.progress_clock import ProgressClock

_tick = ProgressClock.tick
_killed: list[int] = []


def _deadly_tick(self: ProgressClock, what: str) -> None:
    rank, phase, name, *child = os.environ["RLHF_TEST_DEATH"].split()
    _tick(self, what)
    if os.environ["RANK"] != rank or not what.startswith(phase):
        return
    if child:
        if not _killed and what != phase:  # the engine has told of progress: it is at work
            _killed.append(next(p.pid for p in psutil.Process().children(recursive=True) if child[0] in p.cmdline()[0]))
            os.kill(_killed[0], signal.Signals[name])
        return
    time.sleep(1.0)  # the phase gets on record, as it does when phases last longer than a beat
    os.kill(os.getpid(), signal.Signals[name])


if __name__ == "__main__":
    ProgressClock.tick = _deadly_tick
    sys.exit(train.main(sys.argv[1:]))
