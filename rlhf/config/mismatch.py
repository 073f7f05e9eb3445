"""The mismatch watch: how far log-probs of engines and trainer may lie apart, and what follows when they do."""

from dataclasses import dataclass, field

from rlhf.config.checks import at_least, one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchLimits:
    """Of |difference| of one token's log-prob, in nats, at temperature 1 and above; below, they are divided by it."""

    mean: float
    """Over all tokens of a step that are compared; 0 is no limit."""
    max: float
    """Of a single token; 0 is no limit."""

    def __post_init__(self) -> None:
        at_least("mismatch.mean", self.mean, 0.0)
        at_least("mismatch.max", self.max, 0.0)

    def at(self, temperature: float) -> "MismatchLimits":
        """For a sampling temperature: what logits are rounded by is divided by it, too."""
        scale = 1.0 / min(temperature or 1.0, 1.0)
        return MismatchLimits(mean=self.mean * scale, max=self.max * scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchConfig:
    """Rollout engine against trainer: at each step the log-probs of the sampled tokens from both sides are compared."""

    on_breach: str = "warn"
    """When a limit is passed, a few sequences are replayed and the cause is named, on the console and in the run's
    folder mismatch/; then warn goes on, stop ends the run with 3 before these samples are learned from."""
    float32: MismatchLimits = field(default_factory=lambda: MismatchLimits(mean=1e-4, max=1e-3))
    """Limits where the actor is float32; single tokens of two right sides were seen up to 3e-5 apart."""
    bfloat16: MismatchLimits = field(default_factory=lambda: MismatchLimits(mean=0.1, max=0.0))
    """Limits where the actor is bfloat16. Single tokens may differ by whole nats there; means of 0.04 were seen in a
    real model, of 0.09 in random ones with large logits."""
    replay_rows: int = 8
    """Sequences that are replayed after a breach: half of them the worst, the others drawn at random."""

    def __post_init__(self) -> None:
        one_of("mismatch.on_breach", self.on_breach, ("warn", "stop"))
        at_least("mismatch.replay_rows", self.replay_rows, 2)

    def limits(self, dtype: str) -> MismatchLimits:
        """Of an actor of this dtype."""
        return {"float32": self.float32, "bfloat16": self.bfloat16}[dtype]
