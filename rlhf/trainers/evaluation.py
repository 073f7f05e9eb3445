"""How many held-out problems the policy solves."""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from rlhf.algos.pass_at_k import pass_at_k
from rlhf.config.run import EvalConfig
from rlhf.data.batch import FinishReason, PromptBatch, Rollout, ScoredRollout
from rlhf.dist.agree import gather
from rlhf.metrics.run_folder import SampleRecord
from rlhf.rollout.pool import EnginePool
from rlhf.trainers.scoring import Scorer


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What an evaluation found, over all held-out problems; the same on every rank."""

    solved: float
    """Share of responses that solve their problem: with one each the share of problems solved, with k mean@k."""
    reward: float
    """Mean reward of a response."""
    pass_at_k: float
    """Mean over problems of the unbiased estimate that one of eval.pass_k responses solves it."""
    problems: int
    samples: tuple[SampleRecord, ...]
    """Some of the responses, always of the same problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Answers the held-out problems with the engines and scores the answers."""

    config: EvalConfig
    pool: EnginePool | None
    """None on ranks outside the rollout pool."""
    prompts: PromptBatch
    """Held-out prompts that this rank owns, eval.samples_per_prompt rows each."""
    scorer: Scorer | None
    """None on ranks that own no rows."""
    group: ProcessGroup
    """gloo, over all ranks of the job."""
    shown: int = 3
    """Samples kept of each owner."""

    def ask(self, *, leave_out: bool = False, is_lost: bool = False) -> Rollout:
        """Have the engines answer, by the weights that they hold: rows of this rank. Collective over each engine.

        `leave_out`: this rank's engine holds other weights than it should, so others answer its problems; `is_lost`: it
        was lost before. The same on all ranks of the engine. Where all are left out, no problem is counted.

        Raises:
            EngineLostError: All engines are lost. On all leaders.
        """
        if self.pool is None:
            return Rollout.empty()
        prompts = self.prompts if self.scorer is not None else None
        sampling, takes_part = self.config.sampling, not leave_out
        return self.pool.generate(prompts, sampling, takes_part=takes_part, is_lost=is_lost) or Rollout.empty()

    def judge(self, step: int, rollout: Rollout) -> EvaluationResult:
        """What answers are worth. Collective over the job."""
        mine: tuple[list[list[float]], list[SampleRecord]] = ([], [])
        if len(rollout) and self.scorer is not None:
            scored = self.scorer.score(rollout)
            samples = self.config.samples_per_prompt
            firsts = scored.select(torch.arange(0, len(scored), samples)[: self.shown])
            records = sample_records(firsts, self.scorer, count=self.shown, step=step, split="held_out")
            mine = (scored.scores.view(-1, samples).tolist(), records)
        everywhere = gather(mine, self.group)
        return _result(
            [scores for problems, _ in everywhere for scores in problems],
            tuple(record for _, records in everywhere for record in records),
            self.config,
        )


def _result(scores: list[list[float]], samples: tuple[SampleRecord, ...], config: EvalConfig) -> EvaluationResult:
    """Of the scores of each problem's responses."""
    solved = [[score >= config.solved_at for score in mine] for mine in scores]
    responses = max(1, sum(map(len, scores)))
    return EvaluationResult(
        solved=sum(map(sum, solved)) / responses,
        reward=sum(map(sum, scores)) / responses,
        pass_at_k=sum(pass_at_k(len(mine), sum(mine), config.pass_k) for mine in solved) / max(1, len(solved)),
        problems=len(scores),
        samples=samples,
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
