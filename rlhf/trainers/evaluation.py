"""How many held-out problems the policy solves."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from rlhf.config.run import EvalConfig
from rlhf.data.batch import FinishReason, PromptBatch, ScoredRollout
from rlhf.dist.agree import gather
from rlhf.metrics.run_folder import SampleRecord
from rlhf.rollout.engine import RolloutEngine
from rlhf.trainers.scoring import Scorer


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What an evaluation found, over all held-out problems; the same on every rank."""

    solved: float
    """Share of problems solved."""
    reward: float
    """Mean reward."""
    problems: int
    samples: tuple[SampleRecord, ...]
    """Some of the responses, always of the same problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Answers the held-out problems with the engines and scores the answers."""

    config: EvalConfig
    engine: RolloutEngine | None
    """None on ranks outside the rollout pool."""
    prompts: PromptBatch
    """Held-out prompts that this rank owns."""
    scorer: Scorer | None
    """None on ranks that own no rows."""
    group: ProcessGroup
    """gloo, over all ranks of the job."""
    shown: int = 3
    """Samples kept of each owner."""

    def run(self, step: int) -> EvaluationResult:
        """Evaluate the weights that the engines hold. Collective over the job."""
        rollout = self.engine.generate(self.prompts, self.config.sampling) if self.engine else None
        mine: tuple[list[float], list[SampleRecord]] = ([], [])
        if rollout is not None and self.scorer is not None:
            scored = self.scorer.score(rollout)
            rows = sample_records(scored, self.scorer, count=self.shown, step=step, split="held_out")
            mine = (scored.scores.tolist(), rows)
        everywhere = gather(mine, self.group)
        scores = [score for part, _ in everywhere for score in part]
        solved = sum(score >= self.config.solved_at for score in scores)
        return EvaluationResult(
            solved=solved / max(1, len(scores)),
            reward=sum(scores) / max(1, len(scores)),
            problems=len(scores),
            samples=tuple(record for _, records in everywhere for record in records),
        )


def sample_records(scored: ScoredRollout, scorer: Scorer, *, count: int, step: int, split: str) -> list[SampleRecord]:
    """The first `count` of this rank's rows, for people to read."""
    rollout, found = scored.rollout, []
    texts = scorer.texts(rollout)
    for i in range(min(count, len(scored))):
        record, result = rollout.prompts.records[i], scored.results[i]
        versions = rollout.policy_versions.rows()[i]
        found.append(
            SampleRecord(
                step=step,
                split=split,
                sample_id=int(rollout.prompts.sample_ids[i]),
                prompt=record.text,
                response=texts[i],
                answer=record.answer,
                reward=float("nan") if result.error else result.score,
                error=result.error,
                reward_parts=dict(result.parts),
                prompt_tokens=int(rollout.prompts.tokens.lengths[i]),
                response_tokens=int(rollout.responses.lengths[i]),
                finish_reason=FinishReason(int(rollout.finish_reasons[i])).name.lower(),
                policy_version=int(versions[-1]) if len(versions) else -1,
            )
        )
    return found
