"""What each rank knows of a step, and what they make of it together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from rlhf.algos.kl import kl_estimate
from rlhf.algos.whiten import Moments
from rlhf.config.algorithm import PPOConfig
from rlhf.data.batch import Experience, FinishReason
from rlhf.metrics.names import (
    ActorMetrics,
    CriticMetrics,
    EngineMetrics,
    KLMetrics,
    LengthMetrics,
    MismatchMetrics,
    RateMetrics,
    RewardMetrics,
    RolloutMetrics,
    ShapingMetrics,
    StepMetrics,
    SyncMetrics,
    ValueMetrics,
)
from rlhf.metrics.spread import MinMeanMax
from rlhf.models.minibatches import UpdateReport
from rlhf.reshard.stats import ReshardStats
from rlhf.reshard.topology import Link
from rlhf.rollout.performance_window import combined
from rlhf.trainers.driver_state import DriverState, response_kl
from rlhf.trainers.generation import RolloutPart
from rlhf.trainers.shaping import length_penalties

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Sample:
    """Moments and extremes of some numbers; those of parts add up to those of the whole."""

    moments: Moments
    low: float
    high: float

    @staticmethod
    def of(values: Tensor) -> "Sample":
        """Of any number of values, none too."""
        everything = torch.ones(values.shape, dtype=torch.bool)
        low, high = (float(v) for v in values.aminmax()) if values.numel() else (float("inf"), float("-inf"))
        return Sample(Moments.of(values, everything), low, high)

    def __add__(self, other: "Sample") -> "Sample":
        return Sample(self.moments + other.moments, min(self.low, other.low), max(self.high, other.high))

    @property
    def mean(self) -> float:
        """0 when there is no value."""
        return self.moments.mean

    @property
    def std(self) -> float:
        """0 when there is no value."""
        return self.moments.variance**0.5


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one rank contributes: its rows, its clock, and what its roles report."""

    samples: Mapping[str, Sample]
    """Of the rows this rank owns."""
    failure: str = ""
    """What the first reward call that failed on this rank's rows said."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of each phase on this rank."""
    actor: UpdateReport | None = None
    """On the actor's ranks, in steps that train it."""
    critic: UpdateReport | None = None
    """On the critic's ranks."""
    sync: ReshardStats | None = None
    """On the ranks of actor and engines."""
    rollout: RolloutPart | None = None
    """On the leaders of engines."""
    mismatch: MismatchMetrics | None = None
    """Of all ranks together, the same on each."""
    freed_bytes: int = 0
    """What this rank's engine gave back."""
    engines_lost: int = 0
    """So far, over all; known to the ranks of actor and engines."""


def samples_of(experience: Experience, config: PPOConfig, *, solved_at: float) -> dict[str, Sample]:
    """Samples of this rank's rows."""
    shaped, mask = experience.shaped, experience.loss_mask.values
    scored = shaped.scored
    rollout = scored.rollout
    short, long = length_penalties(rollout.responses.lengths, config.length_penalty)
    kl = kl_estimate(experience.old_logprobs.values, experience.ref_logprobs.values, estimator=config.kl_estimator)
    numbers = {
        "score": scored.scores[scored.valid],
        "shaped": shaped.rewards[shaped.counts],
        "short": (short < 0).float(),
        "long": (long < 0).float(),
        "left_out": (scored.valid & ~shaped.counts).float(),
        "solved": (scored.scores >= solved_at).float(),
        "failed": torch.tensor([float(bool(result.error)) for result in scored.results]),
        "prompt_tokens": rollout.prompts.tokens.lengths.float(),
        "response_tokens": rollout.responses.lengths.float(),
        "truncated": (rollout.finish_reasons == FinishReason.LENGTH).float(),
        "kl": kl[mask],
        "kl_of_row": response_kl(experience, config),
        "value": experience.values.values[mask],
        "return": experience.returns.values[mask],
        "error": (experience.returns.values - experience.values.values)[mask],
    }
    return {name: Sample.of(values) for name, values in numbers.items()}


def combine(parts: Mapping[int, StepPart], state: DriverState) -> StepMetrics:
    """Metrics of a step from the parts of all ranks, and the state that it began with."""
    first, *others = [part.samples for part in parts.values()]
    total = {name: sum((other[name] for other in others), sample) for name, sample in first.items()}
    time = {
        phase: MinMeanMax.of({rank: p.seconds[phase] for rank, p in parts.items() if phase in p.seconds})
        for phase in dict.fromkeys(phase for part in parts.values() for phase in part.seconds)
    }
    actor = next((part.actor for part in parts.values() if part.actor), None)
    critic = next((part.critic for part in parts.values() if part.critic), None)
    sync = next((part.sync for part in parts.values() if part.sync), None)
    response_tokens = total["response_tokens"].moments.total
    all_tokens = response_tokens + total["prompt_tokens"].moments.total
    scored = total["score"].moments.count  # none when every reward call failed
    counted = total["shaped"].moments.count
    returns_variance = total["return"].moments.variance
    return StepMetrics(
        reward=RewardMetrics(
            mean=total["score"].mean if scored else NAN,
            std=total["score"].std if scored else NAN,
            min=total["score"].low if scored else NAN,
            max=total["score"].high if scored else NAN,
            solved=total["solved"].mean,
            failed=total["failed"].moments.total,
        ),
        shaping=ShapingMetrics(
            mean=total["shaped"].mean if counted else NAN,
            std=total["shaped"].std if counted else NAN,
            short=total["short"].mean,
            long=total["long"].mean,
            left_out=total["left_out"].moments.total,
        ),
        length=LengthMetrics(
            prompt_mean=total["prompt_tokens"].mean,
            response_mean=total["response_tokens"].mean,
            response_max=total["response_tokens"].high,
            truncated=total["truncated"].mean,
        ),
        kl=KLMetrics(
            ref=total["kl"].mean,
            coef=state.kl_coef,
            penalty=state.kl_coef * total["kl_of_row"].mean,
            update=actor.per("approx_kl_sum", "policy_tokens") if actor else 0.0,
        ),
        value=ValueMetrics(
            mean=total["value"].mean,
            returns_mean=total["return"].mean,
            explained_variance=1 - total["error"].moments.variance / returns_variance if returns_variance else 0.0,
            advantages_std=total["error"].std,  # advantages before whitening are returns - values
        ),
        actor=_actor_metrics(actor) if actor else None,
        critic=_critic_metrics(critic) if critic else None,
        mismatch=next((part.mismatch for part in parts.values() if part.mismatch), None),
        rollout=_rollout_metrics([part.rollout for part in parts.values() if part.rollout]),
        engines=EngineMetrics(
            freed_bytes=sum(part.freed_bytes for part in parts.values()),
            lost=max(part.engines_lost for part in parts.values()),
        ),
        sync=_sync_metrics(sync, state.policy_version) if sync else None,
        rate=RateMetrics(
            tokens_per_s=all_tokens / time["step"].max,
            rollout_tokens_per_s=response_tokens / time["rollout/generate"].max,
        ),
        time=time,
    )


def _rollout_metrics(parts: Sequence[RolloutPart]) -> RolloutMetrics | None:
    """From the parts of the leaders of engines."""
    if not parts:
        return None
    found, pool, tokens = combined([part.window for part in parts]), parts[0].stats, sum(part.tokens for part in parts)
    return RolloutMetrics(
        **{one.name: float(getattr(found, one.name)) for one in fields(RolloutMetrics) if hasattr(found, one.name)},
        queue_time_p50=pool.queue_time_p50_s,
        queue_time_p95=pool.queue_time_p95_s,
        moved_groups=pool.moved,
        padding_waste=pool.padding_waste,
        lost_engines=pool.lost_engines,
        left_prompts=parts[0].left_prompts,
        stale_tokens=sum(part.stale_tokens for part in parts) / tokens if tokens else 0.0,
    )


def _sync_metrics(sync: ReshardStats, policy_version: int) -> SyncMetrics:
    return SyncMetrics(
        bytes=sync.moved,
        bytes_over_bound=sync.ratio,
        copied_bytes=sync.received[Link.SAME_RANK],
        node_bytes=sync.received[Link.SAME_NODE],
        far_bytes=sync.received[Link.ACROSS_NODES],
        far_bytes_over_bound=sync.far_ratio,
        worst_rank_bytes=sync.most_received,
        staging_bytes=sync.staging_bytes,
        tensors=sync.num_tensors,
        policy_version=policy_version,
        quarantined_engines=len(sync.left_out),
    )


def _actor_metrics(report: UpdateReport) -> ActorMetrics:
    return ActorMetrics(
        loss=report.loss,
        entropy=report.per("entropy_sum", "policy_tokens"),
        clip_fraction=report.per("clipped_tokens", "policy_tokens"),
        grad_norm=report.grad_norm,
        clip_factor=report.clip_factor,
        lr=report.lr,
        skipped_steps=report.skipped_steps,
    )


def _critic_metrics(report: UpdateReport) -> CriticMetrics:
    return CriticMetrics(
        loss=report.loss,
        clip_fraction=report.per("value_clipped_tokens", "value_tokens"),
        grad_norm=report.grad_norm,
        clip_factor=report.clip_factor,
        lr=report.lr,
        skipped_steps=report.skipped_steps,
    )
