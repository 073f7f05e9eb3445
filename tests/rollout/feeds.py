"""Feeds for tests: they hand rows out by rules of their own, and keep what comes back."""

from collections.abc import Callable

import torch

from rlhf.data.batch import PromptBatch, Rollout
from rlhf.rollout.feed import Load, Verdict, Work


class Scripted:
    """Hands out works in order, one at a time, when `ready(self)`; ABORT once `stops(self)`, END when all are out."""

    def __init__(
        self,
        works: list[Work],
        *,
        ready: Callable[["Scripted"], bool] = lambda _: True,
        stops: Callable[["Scripted"], bool] = lambda _: False,
    ) -> None:
        self.works, self.ready, self.stops = list(works), ready, stops
        self.asked = self.judged = self.num_done = 0
        self.loads: list[Load] = []
        self.parts: list[Rollout] = []

    def take(self, load: Load) -> Work | None:
        self.asked += 1
        self.loads.append(load)
        return self.works.pop(0) if self.works and self.ready(self) else None

    def done(self, finished: Rollout) -> None:
        self.parts.append(finished)
        self.num_done += len(finished)

    def verdict(self) -> Verdict:
        self.judged += 1
        if self.stops(self):
            return Verdict.ABORT
        return Verdict.GO_ON if self.works else Verdict.END

    def by_sample(self) -> Rollout:
        """What came back, by rising sample id; each sample once."""
        rollout = Rollout.concat(self.parts) if self.parts else Rollout.empty()
        sample_ids = rollout.prompts.sample_ids
        assert sample_ids.unique().numel() == len(rollout), "a row came back twice"
        return rollout.select(sample_ids.argsort())


def one_by_one(batch: PromptBatch, *, size: int = 1) -> list[Work]:
    """Works of so many rows each."""
    return [Work(part) for part in batch.split([len(rows) for rows in torch.arange(len(batch)).split(size)])]


def assert_same(found: Rollout, wanted: Rollout, *, atol: float = 0.0) -> None:
    """The same rows with the same responses; log-probs to the bit, or as close as `atol`."""
    assert found.prompts.sample_ids.tolist() == wanted.prompts.sample_ids.tolist()
    assert found.prompts.tokens.values.tolist() == wanted.prompts.tokens.values.tolist()
    assert [row.tolist() for row in found.responses.rows()] == [row.tolist() for row in wanted.responses.rows()]
    assert found.finish_reasons.tolist() == wanted.finish_reasons.tolist()
    torch.testing.assert_close(found.rollout_logprobs.values, wanted.rollout_logprobs.values, atol=atol, rtol=0)
