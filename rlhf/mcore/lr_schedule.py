"""Learning rate as a pure function of the number of optimizer steps taken."""

from math import cos, pi

from rlhf.config.model import OptimConfig


def learning_rate(config: OptimConfig, steps_done: int) -> float:
    """Rate of the optimizer step that follows `steps_done` steps.

    The warm-up is a line from 0 (which no step uses) to lr at step warmup_steps; then the rate is constant, or falls to
    min_lr over decay_steps and stays there.
    """
    if steps_done < config.warmup_steps:
        return config.lr * (steps_done + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (steps_done - config.warmup_steps) / config.decay_steps)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + cos(pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left
