"""Prompts of a step in, responses of the rows that this rank owns out; all engines answer, whoever owns the rows."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from rlhf.config.run import PPORunConfig
from rlhf.data.batch import PromptBatch, Rollout
from rlhf.data.prompts import PromptSource
from rlhf.metrics.timers import Timers
from rlhf.rollout.answers import Answers
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.performance_window import PerformanceWindow
from rlhf.rollout.pool import EnginePool, PoolReply
from rlhf.rollout.pool_stats import PoolStats
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.ownership import Ownership


@dataclass(frozen=True, slots=True)
class RolloutPart:
    """What a rank that owns rows knows of a step's generation."""

    window: PerformanceWindow
    """Of the engine that this rank leads."""
    stats: PoolStats
    """Of all engines; the same on all leaders."""
    asked_prompts: int
    """Prompts asked, over all owners."""
    left_prompts: int
    """Of these, not among those that the step learns from."""
    tokens: int
    """Response tokens of this rank's rows."""
    stale_tokens: int
    """Of these, sampled by an earlier version of the weights than the step's."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What a step's generation came to on one rank."""

    rollout: Rollout
    """Rows that this rank owns."""
    part: RolloutPart | None = None
    """On owners of rows."""
    left: tuple[int, ...] | None = None
    """Prompts to be asked again; the same on all owners of rows, None elsewhere."""
    begun_tokens: int = 0
    """Of responses that earlier steps began, those that this rank kept until now; other ranks may own their rows."""
    answered: bool = True
    """False where no engine could be asked, and the rows have no response."""


class Generation:
    """Asks the pool for the rows of each step. Every rank of the job makes the same calls."""

    def __init__(
        self,
        config: PPORunConfig,
        *,
        rank: int,
        ownership: Ownership,
        prompts: PromptSource | None,
        pool: EnginePool | None,
        performance: PerformanceMonitor | None,
        timers: Timers,
    ) -> None:
        """`prompts`, `performance`: on leaders of engines, who own the rows. `pool`: on ranks of the rollout pool."""
        self._config, self._prompts, self._pool, self._timers = config, prompts, pool, timers
        self._performance = performance
        self._number, self._num_owners = ownership.engine_led_by(rank), len(ownership.leaders)
        self._begun = Answers.empty()

    def step(self, state: DriverState, *, left_out: bool = False, is_lost: bool = False) -> Generated | None:
        """Responses for a step: those prompts that state.draw names, the first ppo.prompts_per_step to be answered.

        Collective over the rollout pool; other ranks pass through. `left_out`: this rank's engine holds other weights
        than it should, so that it is not asked; `is_lost`: it was lost before. The same on all ranks of the engine.

        What the engines have begun of other prompts is kept here for the next step, where rollout.tail says continue.

        Returns:
            None where all engines were lost before enough was answered, on all leaders. What was answered is kept: call
            again once there are engines with the weights.
        """
        if self._pool is None:
            return Generated(Rollout.empty())
        asked = state.draw(self._config.ppo.prompts_per_step + self._config.extra_prompts).asked
        prompts = self._rows(asked) if self._prompts is not None else None
        measured = self._performance.measuring() if self._performance is not None else nullcontext()
        with self._timers.phase("rollout/generate"), measured:
            reply = self._pool.ask(
                prompts,
                self._config.rollout.sampling,
                keep=self._config.ppo.prompts_per_step,
                begun=self._begun,
                takes_part=not left_out,
                is_lost=is_lost,
            )
        if not self._pool.complete:
            self._begun = Answers.empty() if reply is None else Answers.concat([reply.answers, reply.begun])
            return None
        if reply is None or prompts is None:
            return Generated(Rollout.empty())
        return self._settle(state, asked, prompts, reply)

    def _settle(self, state: DriverState, asked: tuple[int, ...], prompts: PromptBatch, reply: PoolReply) -> Generated:
        """Answers joined with the prompts that this rank now owns."""
        goes_on = self._config.rollout.tail == "continue"
        begun_tokens = self._begun.responses.values.numel()
        answered = reply.stats.engines > 0
        kept = reply.kept if answered else asked[: self._config.ppo.prompts_per_step]
        # of the kept ones too, where nobody was asked; they are not asked again
        goes_on_with = ~torch.isin(reply.begun.prompt_ids, torch.tensor(kept, dtype=torch.int64))
        self._begun = reply.begun.select(goes_on_with.nonzero().flatten()) if goes_on else Answers.empty()
        owned = prompts if kept == asked else self._rows(kept)
        rollout = reply.answers.rollout(owned) if answered else Rollout.unanswered(owned)
        left = tuple(sorted({*asked} - {*kept}))
        versions = rollout.policy_versions.values
        assert self._performance is not None, "leaders have a monitor"
        part = RolloutPart(
            window=self._performance.window(),
            stats=reply.stats,
            asked_prompts=len(asked),
            left_prompts=len(left),
            tokens=versions.numel(),
            stale_tokens=int(((versions >= 0) & (versions != state.policy_version)).sum()),
        )
        return Generated(rollout, part, left if goes_on else (), begun_tokens, answered)

    def _rows(self, prompt_ids: tuple[int, ...]) -> PromptBatch:
        """Of some prompts, those that this rank owns; prompt j of them belongs to owner j % num_owners."""
        assert self._prompts is not None, "owners of rows have the prompts"
        assert self._number is not None, "and lead an engine"
        return self._prompts.rows(prompt_ids[self._number :: self._num_owners])
