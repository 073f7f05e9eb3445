"""From scored responses to what the losses need: log-probs, values, rewards per token, advantages."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.algos.gae import gae
from rlhf.algos.kl import kl_estimate, token_rewards
from rlhf.algos.whiten import Moments, whiten
from rlhf.config.algorithm import PPOConfig
from rlhf.data.batch import Experience, PolicyRows, Provenance, Rollout, Sequences, ShapedRollout, ValueRows
from rlhf.data.ragged import Ragged
from rlhf.models.critic import Critic
from rlhf.models.policy import Policy


@dataclass(frozen=True, slots=True)
class PPOModels:
    """The models PPO asks."""

    actor: Policy
    critic: Critic
    reference: Policy


def make_experience(
    shaped: ShapedRollout,
    models: PPOModels,
    config: PPOConfig,
    *,
    kl_coef: float,
    owners: tuple[int, ...],
    owners_group: ProcessGroup | None,
) -> Experience:
    """Experience of this rank's rows. Called on every rank of the job; a rank that owns no row gets none.

    All three models are dispatched before any is collected, so those on disjoint pools work at the same time.
    `kl_coef`: weight of the KL penalty in this step.
    `owners_group`: gloo over the ranks that own rows, for whitening over the global batch; None on the others.
    """
    sequences = sequences_of(shaped.scored.rollout)
    reference = models.reference.logprobs(sequences, owners=owners)
    critic = models.critic.values(sequences, owners=owners)
    actor = models.actor.logprobs(sequences, owners=owners)
    ref_logprobs, values, old_logprobs = reference.collect().scores, critic.collect().scores, actor.collect().scores

    mask = _loss_mask(shaped)
    lengths = mask.lengths
    kl = kl_estimate(old_logprobs.values, ref_logprobs.values, estimator=config.kl_estimator)
    rewards = token_rewards(shaped.rewards, kl, mask.values, lengths, kl_coef=kl_coef)
    advantages, returns = gae(rewards, values.values, lengths, gamma=config.gamma, gae_lambda=config.gae_lambda)
    if config.whiten_advantages and owners_group is not None:
        advantages = whiten(advantages, mask.values, _global_moments(advantages, mask.values, owners_group))
    return Experience(
        shaped=shaped,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        rewards=mask.like(rewards),
        advantages=mask.like(advantages),
        returns=mask.like(returns),
        loss_mask=mask,
    )


def sequences_of(rollout: Rollout) -> Sequences:
    """Prompt and response of each row as one sequence."""
    prompts, responses = rollout.prompts.tokens, rollout.responses
    both = Ragged.concat([prompts, responses])
    order = torch.arange(len(both)).view(2, -1).T.flatten()
    joined = both.select(order)
    return Sequences(
        rollout.prompts.sample_ids, Ragged(joined.values, prompts.lengths + responses.lengths), responses.lengths
    )


def policy_rows(experience: Experience) -> PolicyRows:
    """What the actor's update needs."""
    return PolicyRows(
        sequences_of(experience.scored.rollout), experience.old_logprobs, experience.advantages, experience.loss_mask
    )


def value_rows(experience: Experience) -> ValueRows:
    """What the critic's update needs."""
    return ValueRows(
        sequences_of(experience.scored.rollout), experience.values, experience.returns, experience.loss_mask
    )


def _loss_mask(shaped: ShapedRollout) -> Ragged:
    """True on sampled tokens of rows that count."""
    provenance = shaped.scored.rollout.provenance
    return provenance.like((provenance.values == Provenance.SAMPLED) & shaped.counts[provenance.row_ids()])


def _global_moments(values: Tensor, mask: Tensor, group: ProcessGroup) -> Moments:
    """Moments over the rows of all owners. Collective over `group`."""
    total = Moments.of(values, mask).to_tensor()
    dist.all_reduce(total, group=group)
    return Moments.from_tensor(total)
