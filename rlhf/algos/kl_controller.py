"""The weight of the KL penalty, moved from step to step so that the divergence settles at a target."""

from math import isfinite

MAX_ERROR = 0.2
"""The relative error counts at most so much, in either direction (the clip of the source)."""


def next_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, num_samples: float) -> float:
    """The coefficient after a step: up when the policy was further from the reference than wanted, down when nearer.

    Args:
        kl_coef: Of the step, above 0.
        kl: What the step measured: mean over its responses of the KL estimate summed over a response, in nats.
        target: What it should be, in nats per response, above 0.
        horizon: Responses after which an error of MAX_ERROR, kept up, has moved the coefficient by about that share.
            At least num_samples, or a step could overshoot.
        num_samples: Responses that `kl` is a mean of.

    Returns:
        kl_coef itself when nothing finite was measured.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2: e = clip(KL / target - 1, -0.2, 0.2), then
    kl_coef * (1 + K e) with K = 0.1. We write K as num_samples / horizon, as the authors' code does, so that the speed
    does not depend on the batch size; K = 0.1 is a horizon of ten steps.
    """
    if not num_samples or not isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return kl_coef * (1 + error * num_samples / horizon)
