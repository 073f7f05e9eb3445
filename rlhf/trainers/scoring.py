"""The rule reward on the rows of their owners: responses as text, one score each."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.data.batch import Rollout, ScoredRollout
from rlhf.data.tokenizer import decode_responses
from rlhf.dist.progress_clock import ProgressClock
from rlhf.reward.function import RewardFunction


@dataclass(frozen=True, slots=True)
class Scorer:
    """Reward function and the tokenizer that turns responses into the text it reads."""

    function: RewardFunction | None
    """None on ranks that own no rows."""
    tokenizer: PreTrainedTokenizerBase
    progress: ProgressClock

    def texts(self, rollout: Rollout) -> list[str]:
        """Responses of this rank's rows as text, without special tokens."""
        return decode_responses(self.tokenizer, rollout.responses)

    def score(self, rollout: Rollout) -> ScoredRollout:
        """Scores of this rank's rows; no communication.

        Raises:
            RewardError: A call failed and reward.on_error is fail.
        """
        if self.function is None or not len(rollout):
            return ScoredRollout(rollout, torch.empty(0), torch.empty(0, dtype=torch.bool), ())
        results = tuple(
            self.function.score(rollout.prompts.records, self.texts(rollout), tick=lambda: self.progress.tick("reward"))
        )
        return ScoredRollout(
            rollout=rollout,
            scores=torch.tensor([result.score for result in results], dtype=torch.float32),
            valid=torch.tensor([self.function.keeps(result) for result in results]),
            results=results,
        )
