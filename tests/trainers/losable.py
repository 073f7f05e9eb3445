"""An engine that is lost when a test says so, otherwise the native one: what SGLang's does, without its processes."""

from typing import Any, ClassVar

import torch

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.errors import EngineLostError
from rlhf.families.spec import ModelSpec
from rlhf.reshard.layout import ModelLayout
from rlhf.rollout.feed import Feed, Load, Verdict, Work
from rlhf.rollout.native.engine import NativeEngine

LOST = "engine_0: scheduler tp 0 (pid 1) was ended by SIGKILL; and so on"


class HalfWay:
    """A feed whose engine is lost when its first rows have come back."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def take(self, load: Load) -> Work | None:
        return self._feed.take(load)

    def done(self, finished: object) -> None:
        self._feed.done(finished)
        raise EngineLostError(LOST)

    def verdict(self) -> Verdict:
        return self._feed.verdict()


class LosableEngine(NativeEngine):
    """Where it will be lost, counted in calls from the start: `plan` is set by the test before the run, a rank each."""

    plan: frozenset[tuple[str, int]] = frozenset()
    restarts = 0
    calls: ClassVar[dict[str, int]] = {}

    def __init__(self, *args: Any, **settings: Any) -> None:
        if self._comes("start"):
            raise EngineLostError(LOST)
        super().__init__(*args, **settings)

    def _comes(self, verb: str) -> bool:
        number = type(self).calls[verb] = type(self).calls.get(verb, 0) + 1
        return (verb, number) in type(self).plan

    def _lose(self) -> None:
        for param in self.params().values():
            param.fill_(torch.nan)
        self._is_lost = True

    def _check(self) -> None:
        if getattr(self, "_is_lost", False):
            raise EngineLostError(LOST)

    def run(self, feed: Feed | None, sampling: SamplingConfig) -> None:
        self._check()
        if not self._comes("run") or feed is None:
            super().run(feed, sampling)
            return
        self._lost_run(feed, sampling)

    def _lost_run(self, feed: Feed, sampling: SamplingConfig) -> None:
        try:
            super().run(HalfWay(feed), sampling)
        finally:
            self._lose()

    def sleep(self, *, weights: bool = False) -> int:
        self._check()
        if self._comes("sleep"):
            self._lose()
            raise EngineLostError(LOST)
        return super().sleep(weights=weights)

    def wake(self) -> None:
        self._check()
        super().wake()

    def weights_updated(self, policy_version: int) -> None:
        if self._comes("weights_updated"):
            self._lose()
        self._check()
        super().weights_updated(policy_version)

    def restart(self) -> None:
        type(self).restarts += 1
        if self._comes("restart"):
            raise EngineLostError(LOST)
        self._is_lost = False
        self._submitted = []
        super().wake()

    def close(self) -> None:
        self._is_lost = False  # one that is lost can be closed too
        super().close()

    @staticmethod
    def layout_of(spec: ModelSpec, config: RolloutConfig, *, dtype: str) -> ModelLayout:
        return NativeEngine.layout_of(spec, config, dtype=dtype)
