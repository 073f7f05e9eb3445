"""How the rows of a step fall to dp ranks and microbatches, for given lengths: as the run itself plans it."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from rlhf.config.run import PPORunConfig, RunConfig
from rlhf.data.microbatch import plan_microbatches
from rlhf.preflight.lengths import Lengths
from rlhf.preflight.roles import ModelRole
from rlhf.preflight.text import table


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One pass of a role over a step's rows, cut into optimizer steps (one when it only scores)."""

    name: str
    optimizer_steps: int
    rows_of_rank: tuple[int, int]
    """Fewest and most rows of a dp rank in one optimizer step."""
    microbatches: tuple[int, int]
    """Fewest and most of a dp rank in one optimizer step; all dp ranks have as many."""
    fill: float
    """Tokens over microbatches times their budget, all dp ranks and steps together."""
    bubble: float
    """Share of time that a pipeline stage stands idle, were all microbatches alike."""
    too_long: int
    """Rows longer than the budget: each is a microbatch of its own, larger than microbatch_tokens says."""


def plan_work(config: RunConfig, roles: Sequence[ModelRole], lengths: Lengths) -> list[Work]:
    """Every pass of a step, in its order."""
    if not isinstance(config, PPORunConfig):
        rows = lengths.draw(config.sft.batch_samples, seed=config.seed)
        return [_work(f"{role.name} update", role, [rows]) for role in roles]
    rows = lengths.draw(config.ppo.samples_per_step, seed=config.seed)
    shuffled = Random(config.seed).sample(rows, len(rows))
    size = config.ppo.minibatch_samples
    minibatches = [shuffled[at : at + size] for at in range(0, len(rows), size)]
    scoring = [_work(f"{role.name} scores", role, [rows]) for role in roles]
    return scoring + [_work(f"{role.name} update", role, minibatches) for role in roles if role.is_trained]


def _work(name: str, role: ModelRole, minibatches: Sequence[Sequence[int]]) -> Work:
    dp, budget = role.config.parallel.dp, role.config.microbatch_tokens
    rows, counts = [], []
    for minibatch in minibatches:
        dealt = [minibatch[rank::dp] for rank in range(dp)]  # as models/calls.py deals them
        rows += [len(part) for part in dealt]
        multiple_of = role.config.parallel.microbatch_multiple
        counts.append(max(len(plan_microbatches(part, budget, None, multiple_of)) for part in dealt))
    tokens, stages, chunks = sum(map(sum, minibatches)), role.config.parallel.pp, role.config.parallel.vpp
    return Work(
        name=name,
        optimizer_steps=len(minibatches) if role.is_trained and name.endswith("update") else 0,
        rows_of_rank=(min(rows), max(rows)),
        microbatches=(min(counts), max(counts)),
        fill=tokens / (sum(counts) * dp * budget),
        bubble=sum((stages - 1) / (count * chunks + stages - 1) for count in counts) / len(counts),
        too_long=sum(length > budget for minibatch in minibatches for length in minibatch),
    )


def render_work(config: RunConfig, works: Sequence[Work], lengths: Lengths) -> str:
    """A table and what the lengths are."""
    count = config.ppo.samples_per_step if isinstance(config, PPORunConfig) else config.sft.batch_samples
    drawn = lengths.draw(count, seed=config.seed)
    rows = [["pass", "optimizer steps", "rows of a dp rank", "microbatches", "filled", "pipeline idle"]]
    rows += [
        [
            one.name,
            str(one.optimizer_steps or "-"),
            _range(*one.rows_of_rank),
            _range(*one.microbatches),
            f"{one.fill:.0%}",
            f"{one.bubble:.0%}",
        ]
        for one in works
    ]
    epochs = f", {config.ppo.epochs} epochs" if isinstance(config, PPORunConfig) and config.ppo.epochs > 1 else ""
    head = [
        f"microbatches of one step{epochs}: {count:,} rows of {min(drawn):,} to {max(drawn):,} tokens, mean "
        f"{sum(drawn) / count:,.0f}",
        f"  lengths {lengths.source}",
    ]
    return "\n".join([*head, *table(rows)])


def work_notes(works: Sequence[Work]) -> list[str]:
    """What a plan wastes."""
    idle = [one.name for one in works if one.rows_of_rank[0] == 0]
    notes = [f"{', '.join(idle)}: some dp ranks get no row; use fewer replicas or more rows"] if idle else []
    waits = [f"{one.name} {one.bubble:.0%}" for one in works if one.bubble > 1 / 4]
    if waits:
        notes.append(
            f"pipeline stages stand idle for over a quarter of the time ({', '.join(waits)}); use fewer stages, "
            "smaller microbatch_tokens or larger minibatches"
        )
    over = [f"{one.too_long} of {one.name}" for one in works if one.too_long]
    if over:
        notes.append(
            f"rows longer than microbatch_tokens ({', '.join(over)}) are microbatches of their own and need more "
            "memory than it says; raise it, or lower the limits of lengths"
        )
    return notes


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"
