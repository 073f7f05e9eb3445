"""Which rank owns which sample: the leader of the engine that answers its prompt, by a rule that every rank knows."""

from dataclasses import dataclass

from rlhf.config.rollout import RolloutConfig


@dataclass(frozen=True, slots=True)
class Ownership:
    """Prompt p, with all its samples, belongs to engine p % num_engines; the engine's first rank holds its rows."""

    leaders: tuple[int, ...]
    """First rank of each engine."""

    @staticmethod
    def of(rollout: RolloutConfig) -> "Ownership":
        """Owners in a rollout pool."""
        return Ownership(tuple(ranks[0] for ranks in rollout.engines))

    def owners(self, num_prompts: int, samples_per_prompt: int) -> tuple[int, ...]:
        """For each row of a global batch, prompts in order and their samples together: the rank that owns it."""
        return tuple(self.leaders[p % len(self.leaders)] for p in range(num_prompts) for _ in range(samples_per_prompt))

    def engine_led_by(self, rank: int) -> int | None:
        """Index of the engine whose first rank this is; None on every other rank."""
        return self.leaders.index(rank) if rank in self.leaders else None
