"""What a step reports: typed groups of numbers, and the flat names they get (`group/field`).

The dataclasses are the list of names: `metric_docs` and README.md are made from them. Knows no trainer and no sink.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import get_args

from rlhf.config.schema import field_docs, field_types
from rlhf.metrics.spread import MinMeanMax


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardMetrics:
    """Scores of the step's responses, as the reward function gave them."""

    mean: float
    """Mean reward."""
    std: float
    """Standard deviation of the reward."""
    min: float
    """Least reward."""
    max: float
    """Greatest reward."""
    solved: float
    """Share of responses with a reward of at least eval.solved_at."""
    failed: float
    """Responses without a score: the reward function raised, hung or gave no finite number, or the engine was left out
    (sync/quarantined_engines)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapingMetrics:
    """What the step learned from: rewards after truncation and length rules, normalisation and clip."""

    mean: float
    """Mean shaped reward of the responses that count in the losses."""
    std: float
    """Standard deviation of the shaped reward."""
    short: float
    """Share of responses penalised for fewer than ppo.length_penalty.min_tokens tokens."""
    long: float
    """Share of responses penalised for their length by ppo.length_penalty.max_tokens and cache_tokens."""
    left_out: float
    """Scored responses left out of the losses because they were truncated (ppo.shaping.truncated = mask)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthMetrics:
    """Tokens of prompts and responses."""

    prompt_mean: float
    """Mean prompt length, in tokens."""
    response_mean: float
    """Mean response length, in tokens."""
    response_max: float
    """Longest response, in tokens."""
    truncated: float
    """Share of responses that ended because max_new_tokens was reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KLMetrics:
    """Distances between policies, per response token."""

    ref: float
    """KL penalty estimate of the sampling policy against the reference, before weighting by kl/coef."""
    coef: float
    """Weight of the KL penalty in this step."""
    penalty: float
    """Mean of the penalty taken off the reward of a response: kl/coef times the sum over its tokens."""
    update: float
    """k3 estimate of how far the step's updates moved the policy from the one that sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueMetrics:
    """The critic before the step's updates."""

    mean: float
    """Mean value over response tokens."""
    returns_mean: float
    """Mean GAE target over response tokens."""
    explained_variance: float
    """1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 no better than a constant."""
    advantages_std: float
    """Standard deviation of the advantages before whitening."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorMetrics:
    """The step's actor updates, mean over optimizer steps unless said."""

    loss: float
    """Clipped policy loss with the entropy bonus."""
    entropy: float
    """Entropy of the policy per response token, in nats."""
    clip_fraction: float
    """Share of response tokens whose probability ratio was outside the clip range."""
    grad_norm: float
    """Global gradient norm before clipping."""
    clip_factor: float
    """What gradients were multiplied with by clipping; 1 is no clipping."""
    lr: float
    """Learning rate of the last optimizer step."""
    skipped_steps: float
    """Optimizer steps left out because the gradient was not finite, or no token counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticMetrics:
    """The step's critic updates, mean over optimizer steps unless said."""

    loss: float
    """Clipped value loss."""
    clip_fraction: float
    """Share of response tokens whose value loss was clipped."""
    grad_norm: float
    """Global gradient norm before clipping."""
    clip_factor: float
    """What gradients were multiplied with by clipping; 1 is no clipping."""
    lr: float
    """Learning rate of the last optimizer step."""
    skipped_steps: float
    """Optimizer steps left out because the gradient was not finite, or no token counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTMetrics:
    """One optimizer step of fine-tuning."""

    loss: float
    """Cross entropy per answer token, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    clip_factor: float
    """What gradients were multiplied with by clipping; 1 is no clipping."""
    lr: float
    """Learning rate."""
    skipped_steps: float
    """1 when the step was left out because the gradient was not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchMetrics:
    """Log-probs of the sampled tokens: rollout engine against trainer, same weights."""

    mean: float
    """Mean absolute difference over the tokens compared, in nats."""
    max: float
    """Largest absolute difference, in nats."""
    ratio: float
    """Mean importance ratio, the trainer's probability of a token by the engine's; about 1 where both are right."""
    kl: float
    """k3 estimate of the divergence of the engine's distribution from the trainer's, in nats per token."""
    tokens: float
    """Tokens compared: drawn by the engines with the weights of this step."""
    other_tokens: float
    """Tokens not compared, since an earlier version of the weights drew them."""
    breach: float
    """1 in a step that passed a limit of the settings mismatch.*, else 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutMetrics:
    """The step's training rollout, as the engines' leaders saw it; of all engines together."""

    latency_p50_s: float
    """Median time from handing a row to an engine to its end, over all rows."""
    latency_p95_s: float
    """The same, which 95 % of the rows do not exceed."""
    first_token_p50_s: float
    """Median time from handing a row to an engine to its first token."""
    first_token_p95_s: float
    """The same, which 95 % of the rows do not exceed."""
    queue_p50_s: float
    """Median time from handing a row to an engine until the engine began with it."""
    queue_p95_s: float
    """The same, which 95 % of the rows do not exceed."""
    queue_mean: float
    """Rows that wait in the engines, mean over the phase, sum over engines."""
    queue_max: float
    """Most rows that waited at a time in one engine."""
    prefill_tokens_per_s: float
    """Prompt tokens that an engine computed by the time in which any of its rows was before its first token, sum over
    engines."""
    decode_tokens_per_s: float
    """Response tokens after the first by the time in which any row was after its first token, sum over engines."""
    utilisation: float
    """Share of the phase in which an engine had a row to work on, mean over engines."""
    busy_spread: float
    """Longest time that an engine had rows by the mean over engines; 1 when all end together."""
    running_mean: float
    """Rows an engine worked on at a time while it had any, mean over engines."""
    cache_hits: float
    """Share of prompt tokens that were not computed for their row: in the cache, or shared with another sample."""
    queue_time_p50: float
    """Median seconds until an engine took a row, from the beginning of the generation."""
    queue_time_p95: float
    """Seconds within which engines had taken 95 % of the rows."""
    moved_groups: float
    """Prompts (batches of them, with rollout.batching = buckets) that another engine answered than was planned."""
    padding_waste: float
    """Share of the tokens of slots that no row had (rollout.batching = buckets); 0 where rows come and go."""
    lost_engines: float
    """Engines that were lost while they answered."""
    left_prompts: float
    """Prompts that were asked beyond those that the step learned from (rollout.oversample)."""
    stale_tokens: float
    """Share of response tokens that an earlier version of the weights sampled (rollout.tail = continue)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMetrics:
    """Life of the rollout engines."""

    freed_bytes: float
    """Bytes that the engines gave back when they last went to sleep, sum over engines."""
    lost: float
    """Engines lost and replaced since this start of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncMetrics:
    """The step's move of weights from actor to engines."""

    bytes: float
    """Bytes received from other ranks, over all ranks."""
    bytes_over_bound: float
    """Bytes moved by the lower bound of what had to move; 1 is optimal, and so is nothing to move."""
    copied_bytes: float
    """Bytes copied inside a rank, over all ranks."""
    node_bytes: float
    """Bytes received from ranks of the same node, over all ranks."""
    far_bytes: float
    """Bytes received from other nodes, over all ranks."""
    far_bytes_over_bound: float
    """Bytes between nodes by their lower bound, with the fanout chosen."""
    worst_rank_bytes: float
    """Bytes that the rank that received most received from other ranks."""
    staging_bytes: float
    """Most memory that a rank had allocated for the transfer beside the weights."""
    tensors: float
    """Logical tensors that were sent; the others had not changed."""
    policy_version: float
    """Version of the weights that the engines then held."""
    quarantined_engines: float
    """Engines that held other weights even when sent twice, and were not asked (sync.on_mismatch)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateMetrics:
    """Speed over the whole job."""

    tokens_per_s: float
    """Prompt and response tokens of the step by its seconds."""
    rollout_tokens_per_s: float
    """Response tokens by the seconds of the rollout phase; 0 where nothing was sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockMetrics:
    """The run's own clock."""

    seconds: float
    """Seconds from the run's start to the end of the step, evaluations included; loading, time between two starts of
    the run and work that was lost with a failed one are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutMetrics:
    """Evaluation on held-out problems; only in steps that evaluate."""

    solved: float
    """Share of responses to held-out problems that solve them; with one each, of problems solved."""
    reward: float
    """Mean reward of responses to held-out problems."""
    pass_at_k: float
    """Mean over problems of the chance that one of eval.pass_k responses solves it, an unbiased estimate."""
    problems: float
    """Problems evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """All numbers of one step; a group that does not apply to it is None."""

    reward: RewardMetrics | None = None
    """Scores of the step's responses."""
    shaping: ShapingMetrics | None = None
    """What was learned from instead of the scores."""
    length: LengthMetrics | None = None
    """Tokens of prompts and responses."""
    kl: KLMetrics | None = None
    """Distances between policies."""
    value: ValueMetrics | None = None
    """The critic before the updates."""
    actor: ActorMetrics | None = None
    """Actor updates."""
    critic: CriticMetrics | None = None
    """Critic updates."""
    sft: SFTMetrics | None = None
    """Fine-tuning."""
    mismatch: MismatchMetrics | None = None
    """Rollout engine against trainer."""
    rollout: RolloutMetrics | None = None
    """How the engines did."""
    engines: EngineMetrics | None = None
    """Life of the engines."""
    sync: SyncMetrics | None = None
    """Weights to the engines."""
    rate: RateMetrics | None = None
    """Speed."""
    clock: ClockMetrics | None = None
    """Time of the run."""
    held_out: HeldOutMetrics | None = None
    """Evaluation."""
    time: Mapping[str, MinMeanMax] = field(default_factory=dict)
    """Seconds of each phase over the ranks; phase `step` is the whole step."""

    def flatten(self) -> dict[str, float]:
        """The numbers by their flat names: `reward/mean`, `time/rollout_s/max`."""
        flat: dict[str, float] = {}
        for name in GROUPS:
            group = getattr(self, name)
            if group is not None:
                flat |= {f"{name}/{f.name}": float(getattr(group, f.name)) for f in fields(group)}
        for phase, spread in self.time.items():
            flat |= {time_name(phase, part): getattr(spread, part) for part in ("min", "mean", "max")}
        return flat


GROUPS: dict[str, type] = {name: get_args(kind)[0] for name, kind in field_types(StepMetrics).items() if name != "time"}


def time_name(phase: str, part: str = "mean") -> str:
    """Flat name of a phase's seconds; part is min, mean or max over the ranks."""
    return f"time/{phase}_s/{part}"


def metric_docs() -> dict[str, str]:
    """Meaning of every flat name, those of phases aside."""
    return {f"{group}/{name}": doc for group, cls in GROUPS.items() for name, doc in field_docs(cls).items()}
