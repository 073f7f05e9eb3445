"""An engine that draws at another temperature than it is asked for, by import path in a launched run."""

from dataclasses import replace

from rlhf.config.rollout import SamplingConfig
from rlhf.rollout.feed import Feed
from rlhf.rollout.native.engine import NativeEngine


class WarmEngine(NativeEngine):
    """Half as warm again."""

    def run(self, feed: Feed | None, sampling: SamplingConfig) -> None:
        super().run(feed, replace(sampling, temperature=sampling.temperature * 1.5))
