"""`submit` and `collect` of any engine, over its `run`."""

from itertools import groupby
from operator import itemgetter
from typing import Protocol

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import Rollout
from rlhf.rollout.feed import Feed, FixedRows, Work

Submissions = list[tuple[SamplingConfig, Work | None]]
"""In their order; None on ranks that do not lead."""


class Runs(Protocol):
    """What of an engine is needed here."""

    def run(self, feed: Feed | None, sampling: SamplingConfig) -> None:
        """See `RolloutEngine.run`."""
        ...


def collect(engine: Runs, submissions: Submissions) -> Rollout | None:
    """Responses to all rows in their order, on the leader; one run of the engine for consecutive equal samplings.

    Collective over the engine.
    """
    found = []
    for sampling, group in groupby(submissions, key=itemgetter(0)):
        works = [work for _, work in group if work is not None]
        feed = FixedRows(works) if works else None
        engine.run(feed, sampling)
        if feed is not None:
            found.append(feed.ordered())
    return Rollout.concat(found) if found else None
