"""Numbers of the training algorithms."""

from dataclasses import dataclass, field

from rlhf.config.checks import at_least, between, more_than, one_of, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class KLControllerConfig:
    """What becomes of ppo.kl_coef from one step to the next. Source: arXiv:1909.08593, section 2.2."""

    kind: str = "fixed"
    """fixed, or adaptive: after each step that trains the actor up when the policy is further from the reference than
    target, else down."""
    target: float = 6.0
    """Divergence to settle at: mean over responses of the KL summed over a response's tokens, in nats."""
    horizon: int = 10000
    """Responses after which an error of 20 % or more, kept up, has moved the coefficient by about 20 %."""

    def __post_init__(self) -> None:
        one_of("kl_controller.kind", self.kind, ("fixed", "adaptive"))
        more_than("kl_controller.target", self.target, 0.0)
        at_least("kl_controller.horizon", self.horizon, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthPenaltyConfig:
    """What is taken off the score of a response for its length, before anything is normalised."""

    min_tokens: int = 0
    """A response shorter than this pays short_penalty; 0 asks for no length."""
    short_penalty: float = 1.0
    """Taken off the score of a response that is too short."""
    max_tokens: int = 0
    """Length from which all of long_penalty is taken off (L_max of arXiv:2503.14476, eq. 13); 0 never takes any."""
    cache_tokens: int = 0
    """Over the last so many tokens up to max_tokens the penalty grows from 0 in a line (L_cache there)."""
    long_penalty: float = 1.0
    """Most that is taken off the score of a long response."""

    def __post_init__(self) -> None:
        for name in ("min_tokens", "max_tokens", "cache_tokens"):
            at_least(f"length_penalty.{name}", getattr(self, name), 0)
        for name in ("short_penalty", "long_penalty"):
            at_least(f"length_penalty.{name}", getattr(self, name), 0.0)
        if self.cache_tokens > self.max_tokens:
            refuse(
                f"length_penalty.cache_tokens: {self.cache_tokens} is more than max_tokens = {self.max_tokens}; needs "
                f"a part of it; set length_penalty.max_tokens to the length at which the penalty is full"
            )
        if self.max_tokens and self.min_tokens > self.max_tokens - self.cache_tokens:
            refuse(
                f"length_penalty.min_tokens: {self.min_tokens} is more than max_tokens - cache_tokens = "
                f"{self.max_tokens} - {self.cache_tokens}, so that every length is penalised; lower the first"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardShapingConfig:
    """From the score of a response to the reward on its last token: truncation, length, normalisation, clip."""

    truncated: str = "keep"
    """A response cut off at max_new_tokens keeps its score (keep), gets truncated_score (score), or takes part in no
    loss and no statistic of shaping (mask)."""
    truncated_score: float = 0.0
    """Score of a truncated response, where truncated = score."""
    normalize: str = "none"
    """none; or subtract the mean and divide by the standard deviation of: all rewards of the run so far (running), of
    the step (batch), of the samples of the same prompt (group, arXiv:2402.03300)."""
    clip: tuple[float, ...] = ()
    """Least and greatest reward after normalisation, such as [-5,5]; empty clips nothing."""

    def __post_init__(self) -> None:
        one_of("shaping.truncated", self.truncated, ("keep", "score", "mask"))
        one_of("shaping.normalize", self.normalize, ("none", "running", "batch", "group"))
        if self.clip and (len(self.clip) != 2 or self.clip[0] >= self.clip[1]):
            refuse(
                f"shaping.clip: {list(self.clip)} given; needs the least and the greatest reward, or nothing; "
                f"write shaping.clip=[-5,5]"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLossConfig:
    """The critic's loss."""

    kind: str = "mse"
    """mse (half the squared error) or huber (beyond huber_delta the error counts by its size)."""
    huber_delta: float = 10.0
    """Where huber turns from square to line, in units of return. Source: MAPPO's, arXiv:2103.01955."""
    clip: str = "absolute"
    """New values gain nothing by moving from the old ones further than clip_eps (absolute, arXiv:2005.12729), clip_eps
    standard deviations of the returns of all earlier steps (relative: what clipping a critic of normalised returns
    comes to, arXiv:2103.01955), or they may move freely (none, arXiv:2006.05990 finds no gain in clipping)."""
    clip_eps: float = 0.2
    """How far, in units of return or in their standard deviations."""

    def __post_init__(self) -> None:
        one_of("value_loss.kind", self.kind, ("mse", "huber"))
        more_than("value_loss.huber_delta", self.huber_delta, 0.0)
        one_of("value_loss.clip", self.clip, ("none", "absolute", "relative"))
        more_than("value_loss.clip_eps", self.clip_eps, 0.0)


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
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    """The critic's loss."""
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """GAE lambda: 1 is Monte-Carlo, 0 is one-step TD."""
    kl_coef: float = 0.01
    """Weight of the KL penalty against the reference in the per-token reward; the first one if it is adaptive."""
    kl_controller: KLControllerConfig = field(default_factory=KLControllerConfig)
    """What becomes of the weight."""
    kl_estimator: str = "k1"
    """k1, k2 or k3 of Schulman's note on approximating KL."""
    length_penalty: LengthPenaltyConfig = field(default_factory=LengthPenaltyConfig)
    """Penalties on responses that are too short or too long."""
    shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    """From score to reward."""
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
        self._check_parts()

    def _check_parts(self) -> None:
        if self.kl_controller.kind == "adaptive":
            more_than("ppo.kl_coef", self.kl_coef, 0.0)  # a controller multiplies
            if self.kl_controller.horizon < self.samples_per_step:
                refuse(
                    f"ppo.kl_controller.horizon: {self.kl_controller.horizon} is less than prompts_per_step * "
                    f"samples_per_prompt = {self.samples_per_step}, so that one step overshoots; raise the first"
                )
        if self.shaping.normalize == "group" and self.samples_per_prompt < 2:
            refuse(
                f"ppo.shaping.normalize: group with samples_per_prompt = {self.samples_per_prompt} makes every reward "
                f"0; needs several samples of a prompt; set ppo.samples_per_prompt=4"
            )

    @property
    def samples_per_step(self) -> int:
        """Responses of one step over the whole job."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def needs_moments(self) -> bool:
        """Whether what a step measured changes how the next one learns."""
        return (
            self.kl_controller.kind == "adaptive"
            or self.shaping.normalize == "running"
            or self.value_loss.clip == "relative"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Supervised fine-tuning on prompt / answer rows: cross entropy on the answer's tokens."""

    batch_samples: int = 64
    """Rows in one optimizer step, over the whole job."""

    def __post_init__(self) -> None:
        at_least("sft.batch_samples", self.batch_samples, 1)
