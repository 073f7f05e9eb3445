"""From scores to rewards: rules on truncation and length, then normalisation, then a clip."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.algos.running import RunningMoments
from rlhf.algos.shaping import group_standardised, overlong_penalty, short_penalty, standardised
from rlhf.config.algorithm import LengthPenaltyConfig, PPOConfig
from rlhf.data.batch import FinishReason, ScoredRollout, ShapedRollout
from rlhf.dist.agree import gather


def shape_rewards(
    scored: ScoredRollout, config: PPOConfig, *, earlier: RunningMoments, owners_group: ProcessGroup | None
) -> ShapedRollout:
    """Rewards of this rank's rows; the scores stay as they are.

    Collective over `owners_group` (gloo, the ranks that own rows; None on the others) where the rewards are normalised
    over the batch or the run. `earlier`: moments of the rewards of all steps before this one.

    Statistics are over rows that count, this step's included: the first step of a run is normalised by itself.
    """
    shaping = config.shaping
    truncated = scored.rollout.finish_reasons == FinishReason.LENGTH
    counts = scored.valid & ~truncated if shaping.truncated == "mask" else scored.valid
    adjusted = scored.scores
    if shaping.truncated == "score":
        adjusted = adjusted.masked_fill(truncated, shaping.truncated_score)
    short, long = length_penalties(scored.rollout.responses.lengths, config.length_penalty)
    adjusted = adjusted + short + long
    rewards = adjusted
    if shaping.normalize == "group":
        rewards = group_standardised(adjusted, counts, scored.rollout.prompts.prompt_ids)
    elif shaping.normalize != "none" and owners_group is not None:
        now = RunningMoments.merged(gather(RunningMoments.of(adjusted[counts]), owners_group))
        moments = earlier + now if shaping.normalize == "running" else now
        rewards = standardised(adjusted, mean=moments.mean, variance=moments.variance)
    if shaping.clip:
        rewards = rewards.clamp(*shaping.clip)
    return ShapedRollout(scored, adjusted, rewards, counts)


def length_penalties(lengths: Tensor, config: LengthPenaltyConfig) -> tuple[Tensor, Tensor]:
    """What is added to the scores of responses of these lengths (int64 [B]) for being short, and for being long."""
    short = short_penalty(lengths, min_tokens=config.min_tokens, penalty=config.short_penalty)
    if not config.max_tokens:
        return short, torch.zeros_like(short)
    long = overlong_penalty(
        lengths, max_tokens=config.max_tokens, cache_tokens=config.cache_tokens, penalty=config.long_penalty
    )
    return short, long
