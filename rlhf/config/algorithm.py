"""Numbers of the training algorithms."""

from dataclasses import dataclass

from rlhf.config.checks import at_least, between, more_than, one_of, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """Proximal policy optimisation. Source: arXiv:1707.06347; for language models arXiv:2203.02155."""

    prompts_per_step: int = 64
    """Prompts answered in one step, over the whole job."""
    samples_per_prompt: int = 1
    """Responses to each prompt."""
    minibatch_samples: int = 64
    """Responses in one optimizer step, over the whole job; must divide prompts_per_step * samples_per_prompt."""
    epochs: int = 1
    """Passes over a step's experience."""
    clip_eps: float = 0.2
    """The probability ratio is clipped to 1 - clip_eps .. 1 + clip_eps."""
    value_clip_eps: float = 0.2
    """New values may move this far from the old ones before the value loss is clipped; 0 never clips."""
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """GAE lambda: 1 is Monte-Carlo, 0 is one-step TD."""
    kl_coef: float = 0.01
    """Weight of the KL penalty against the reference in the per-token reward."""
    kl_estimator: str = "k1"
    """k1, k2 or k3 of Schulman's note on approximating KL."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the policy loss."""
    whiten_advantages: bool = True
    """Advantages get mean 0 and variance 1 over the global batch."""
    critic_warmup_steps: int = 0
    """First steps in which only the critic is trained."""

    def __post_init__(self) -> None:
        counts = ("prompts_per_step", "samples_per_prompt", "minibatch_samples", "epochs")
        are_counts = all([at_least(f"ppo.{name}", getattr(self, name), 1) for name in counts])
        more_than("ppo.clip_eps", self.clip_eps, 0.0)
        at_least("ppo.value_clip_eps", self.value_clip_eps, 0.0)
        between("ppo.gamma", self.gamma, 0.0, 1.0)
        between("ppo.gae_lambda", self.gae_lambda, 0.0, 1.0)
        at_least("ppo.kl_coef", self.kl_coef, 0.0)
        one_of("ppo.kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        at_least("ppo.entropy_coef", self.entropy_coef, 0.0)
        at_least("ppo.critic_warmup_steps", self.critic_warmup_steps, 0)
        if are_counts and self.samples_per_step % self.minibatch_samples:
            refuse(
                f"ppo.minibatch_samples: {self.minibatch_samples} does not divide prompts_per_step * "
                f"samples_per_prompt = {self.samples_per_step}; needs a divisor; change one of the three"
            )

    @property
    def samples_per_step(self) -> int:
        """Responses of one step over the whole job."""
        return self.prompts_per_step * self.samples_per_prompt

    def policy_version(self, steps_done: int) -> int:
        """Steps that have changed the actor, of so many steps done."""
        return max(0, steps_done - self.critic_warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Supervised fine-tuning on prompt / answer rows: cross entropy on the answer's tokens."""

    batch_samples: int = 64
    """Rows in one optimizer step, over the whole job."""

    def __post_init__(self) -> None:
        at_least("sft.batch_samples", self.batch_samples, 1)
