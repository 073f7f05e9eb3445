"""How far apart the log-probs of engine and trainer are, over the tokens that can be compared."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.config.mismatch import MismatchLimits
from rlhf.data.batch import Provenance, Rollout
from rlhf.metrics.names import MismatchMetrics

LOUDEST = 20.0
"""Nats beyond which a difference is no longer put into an exponential function."""


def comparable(rollout: Rollout, policy_version: int) -> Tensor:
    """Which tokens, bool [sum T], the engine drew by weights of this version, which are the trainer's.

    Left out are tokens that nobody drew (tools, templates, rows of engines that were left out), and those that an
    earlier version drew before its response was continued.
    """
    drawn = rollout.provenance.values == Provenance.SAMPLED
    return drawn & (rollout.policy_versions.values == policy_version)


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over tokens; those of ranks add up."""

    tokens: int = 0
    """Compared."""
    other_tokens: int = 0
    """Drawn by another version, and so not compared."""
    begun_tokens: int = 0
    """Of responses that earlier steps began; so many of `other_tokens` may be theirs."""
    not_finite: int = 0
    """Compared tokens whose log-prob is not finite on one side; they count as `LOUDEST`."""
    absolute: float = 0.0
    largest: float = 0.0
    ratio: float = 0.0
    kl: float = 0.0

    @staticmethod
    def of(rollout: Rollout, old_logprobs: Tensor, policy_version: int, *, begun_tokens: int = 0) -> "Tally":
        """Of this rank's rows; `old_logprobs` [sum T] are the trainer's."""
        counts = comparable(rollout, policy_version)
        drawn = int((rollout.provenance.values == Provenance.SAMPLED).sum())
        difference = (old_logprobs - rollout.rollout_logprobs.values)[counts].double()
        finite = difference.isfinite()
        difference = difference.where(finite, LOUDEST)
        apart, log_ratio = difference.abs(), difference.clamp(-LOUDEST, LOUDEST)
        return Tally(
            tokens=difference.numel(),
            other_tokens=drawn - difference.numel(),
            begun_tokens=begun_tokens,
            not_finite=int((~finite).sum()),
            absolute=float(apart.sum()),
            largest=float(apart.max()) if apart.numel() else 0.0,
            ratio=float(log_ratio.exp().sum()),
            kl=float((log_ratio.exp() - 1.0 - log_ratio).sum()),
        )

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            tokens=self.tokens + other.tokens,
            other_tokens=self.other_tokens + other.other_tokens,
            begun_tokens=self.begun_tokens + other.begun_tokens,
            not_finite=self.not_finite + other.not_finite,
            absolute=self.absolute + other.absolute,
            largest=max(self.largest, other.largest),
            ratio=self.ratio + other.ratio,
            kl=self.kl + other.kl,
        )

    @property
    def mean(self) -> float:
        """Mean |difference|, in nats; 0 without tokens."""
        return self.absolute / max(1, self.tokens)

    @property
    def is_stale(self) -> bool:
        """Engines answered, and not one token by the weights that they were sent.

        A step whose responses were all whole before it has none either, and is not stale.
        """
        return self.other_tokens > self.begun_tokens and self.tokens == 0

    def breach(self, limits: MismatchLimits) -> str:
        """Which limit is passed, in words; empty when none is."""
        if self.is_stale:
            return f"none of {self.other_tokens} tokens was drawn by the weights of this step"
        if self.not_finite:
            return f"{self.not_finite} of {self.tokens} tokens have a log-prob that is not finite on one side"
        found = []
        if limits.mean and self.mean > limits.mean:
            found.append(f"mean |difference| {self.mean:.2e} is over {limits.mean:.2e}")
        if limits.max and self.largest > limits.max:
            found.append(f"largest |difference| {self.largest:.2e} is over {limits.max:.2e}")
        return ", ".join(found)

    def metrics(self, *, breach: bool) -> MismatchMetrics:
        """As a step reports them."""
        count = max(1, self.tokens)
        return MismatchMetrics(
            mean=self.mean,
            max=self.largest,
            ratio=self.ratio / count if self.tokens else 1.0,
            kl=self.kl / count,
            tokens=self.tokens,
            other_tokens=self.other_tokens,
            breach=float(breach),
        )


def worst_of_rows(rollout: Rollout, old_logprobs: Tensor, policy_version: int) -> Tensor:
    """float32 [B]: each row's largest |difference|; -1 where no token can be compared."""
    apart = (old_logprobs - rollout.rollout_logprobs.values).abs().nan_to_num(nan=LOUDEST, posinf=LOUDEST)
    apart = apart.where(comparable(rollout, policy_version), -1.0)
    found = torch.full((len(rollout),), -1.0)
    return found.scatter_reduce(0, rollout.responses.row_ids(), apart, "amax")
