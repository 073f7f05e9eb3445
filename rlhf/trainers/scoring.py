"""The rule reward on the rows of their owners: responses as text, one score each."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhf.data.batch import Rollout, ScoredRollout
from rlhf.data.record import RewardResult
from rlhf.data.tokenizer import decode_responses
from rlhf.dist.progress_clock import ProgressClock
from rlhf.reward.function import RewardFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WRONG_WEIGHTS = "its engine held other weights than the actor (sync.on_mismatch=quarantine)"
"""Why the rows of an engine that a sync leaves out have no score."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Reward function and the tokenizer that turns responses into the text it reads. Only owners of rows have one."""

    function: RewardFunction
    tokenizer: "PreTrainedTokenizerBase"
    progress: ProgressClock

    def texts(self, rollout: Rollout) -> list[str]:
        """Responses of this rank's rows as text, without special tokens."""
        return decode_responses(self.tokenizer, rollout.responses)

    def score(self, rollout: Rollout) -> ScoredRollout:
        """Scores of this rank's rows; no communication.

        Raises:
            RewardError: A call failed and reward.on_error is fail.
        """
        results = tuple(
            self.function.score(rollout.prompts.records, self.texts(rollout), tick=lambda: self.progress.tick("reward"))
        )
        return ScoredRollout(
            rollout=rollout,
            scores=torch.tensor([result.score for result in results], dtype=torch.float32),
            valid=torch.tensor([self.function.keeps(result) for result in results], dtype=torch.bool),
            results=results,
        )


def dropped(rollout: Rollout, error: str) -> ScoredRollout:
    """The rows without a score, which take part in no loss; no reward function is called."""
    rows = len(rollout)
    return ScoredRollout(
        rollout=rollout,
        scores=torch.zeros(rows),
        valid=torch.zeros(rows, dtype=torch.bool),
        results=(RewardResult(0.0, error=error),) * rows,
    )
