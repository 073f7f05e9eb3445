"""A few sequences of a step, computed once more in other ways by trainer and engines. Every rank takes part.

Rows and answers travel to all ranks (they are few); rank 0, the first of the job, asks the roles and collects.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import PromptBatch, Rollout, Sequences, TokenScores
from rlhf.data.ragged import Ragged
from rlhf.dist.agree import from_first, gather
from rlhf.mcore.readings import Reading
from rlhf.models.calls import PendingRows, RoleCalls
from rlhf.models.policy import Policy
from rlhf.reshard.quarantine import listed
from rlhf.rollout.engine import RolloutEngine
from rlhf.trainers.experience import sequences_of
from rlhf.trainers.mismatch.evidence import Again, Evidence, ReplayedRow, WeightCheck, differing
from rlhf.trainers.mismatch.readings import ROUNDS, configured, first_round, next_round
from rlhf.trainers.mismatch.tally import comparable, worst_of_rows
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.recovery import Recovery

ASKED = 4
"""Prompts that each engine is asked again, at most."""

ASKED_TOKENS = 512
"""Of each of these answers, at most: they are drawn one after the other."""

CLOSER = 0.8
"""Another round of readings is tried while the last one brought the mean square down to less than this share."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows to replay, the same on every rank."""

    rollout: Rollout
    old_logprobs: Ragged
    is_drawn: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replays:
    """What a triage asks of the roles. Its methods are called on every rank of the job, in the same order."""

    rank: int
    group: ProcessGroup
    """gloo, over all ranks of the job."""
    actor: Policy
    calls: RoleCalls
    engine: RolloutEngine | None
    """None on ranks outside the rollout pool."""
    leads: bool
    """Whether this rank leads its engine."""
    policy_sync: PolicySync
    recovery: Recovery
    """Of this rank's engine: those that are lost meanwhile are replaced."""
    awake: Callable[[], AbstractContextManager[None]]
    """The engines have the memory that they answer with while it lasts."""
    sampling: SamplingConfig

    def gather(
        self,
        rollout: Rollout,
        old_logprobs: Ragged,
        *,
        policy_version: int,
        step_mean: float,
        rows: int,
        seed: str,
        left_out: bool,
    ) -> Evidence:
        """Choose rows and replay them. The evidence is whole on rank 0 alone.

        Where `rollout.on_loss` is replace, an engine that is lost is started anew: it takes part from then on, and what
        it had not said is missing.

        `step_mean`: mean |difference| over the step. `left_out`: this rank's engine is known to hold wrong weights, and
        is not asked.

        Raises:
            EngineLostError, WeightSyncError: See `Recovery.again`.
        """
        losses = self.recovery.num_losses
        chosen = self._choose(rollout, old_logprobs, policy_version=policy_version, rows=rows, seed=seed)
        counts = Ragged(comparable(chosen.rollout, policy_version), chosen.rollout.responses.lengths)
        weights = self._compare_weights()
        alone = self._score_alone(sequences_of(chosen.rollout))
        replayed = tuple(
            ReplayedRow(*row)
            for row in zip(
                chosen.rollout.prompts.sample_ids.tolist(),
                chosen.rollout.prompts.tokens.lengths.tolist(),
                chosen.is_drawn,
                chosen.rollout.responses.rows(),
                counts.rows(),
                chosen.rollout.rollout_logprobs.rows(),
                chosen.old_logprobs.rows(),
                alone.rows() if self.rank == 0 else chosen.old_logprobs.rows(),
                strict=True,
            )
        )
        readings = self._search(chosen, replayed)
        again = self._ask_engines(chosen, policy_version=policy_version, left_out=left_out)
        self.calls.flush()
        lost = max(gather(self.recovery.num_losses - losses, self.group))  # ranks of neither pool do not know
        return Evidence(replayed, readings, *again, weights, step_mean, configured(self.sampling), lost)

    def _choose(self, rollout: Rollout, old_logprobs: Ragged, *, policy_version: int, rows: int, seed: str) -> Chosen:
        """The rows with the largest differences, and as many of the others by lot."""
        worst = worst_of_rows(rollout, old_logprobs.values, policy_version)
        mine = list(zip(worst.tolist(), rollout.prompts.sample_ids.tolist(), strict=True))
        everyone = sorted((one for part in gather(mine, self.group) for one in part if one[0] >= 0.0), reverse=True)
        ids = [sample_id for _, sample_id in everyone]
        picked = ids[: (rows + 1) // 2]
        others = sorted(ids[len(picked) :])
        drawn = Random(seed).sample(others, min(len(others), rows - len(picked)))
        place = {sample_id: at for at, sample_id in enumerate(rollout.prompts.sample_ids.tolist())}
        here = torch.tensor([place[i] for i in [*picked, *drawn] if i in place], dtype=torch.int64)
        parts = gather((rollout.select(here), old_logprobs.select(here)), self.group)
        joined, old = Rollout.concat([part for part, _ in parts]), Ragged.concat([part for _, part in parts])
        came = {sample_id: at for at, sample_id in enumerate(joined.prompts.sample_ids.tolist())}
        order = torch.tensor([came[sample_id] for sample_id in [*picked, *drawn]], dtype=torch.int64)
        is_drawn = (*(False for _ in picked), *(True for _ in drawn))
        return Chosen(joined.select(order), old.select(order), is_drawn)

    def _compare_weights(self) -> WeightCheck:
        """Impossible where an engine is lost meanwhile: then too the next transfer sends all."""
        found = self.recovery.sync(self.policy_sync.compare)
        mine = None
        if found is not None:
            mine = WeightCheck(
                was_possible=True,
                tensors=tuple(sorted({one.tensor for one in found})),
                of=self.policy_sync.num_tensors,
                text=listed(found),
            )
        return next((one for one in gather(mine, self.group) if one is not None), WeightCheck(was_possible=False))

    def _score_alone(self, sequences: Sequences) -> Ragged:
        """The trainer's log-probs, on rank 0, with each row alone in its forward pass."""
        return self._on_first(sequences, replace(self.actor, microbatch_tokens=1).logprobs)

    def _search(self, chosen: Chosen, rows: Sequence[ReplayedRow]) -> dict[Reading, tuple[Tensor, ...]]:
        """Readings closer and closer to the engine's log-probs; rank 0 says which are next."""
        sequences = sequences_of(chosen.rollout)
        found: dict[Reading, tuple[Tensor, ...]] = {}
        wanted, least = first_round(self.sampling), float("inf")
        for _ in range(ROUNDS):
            scores = self._on_first(sequences, partial(self.actor.readings, readings=wanted))
            if self.rank == 0:
                columns = [row.view(len(wanted), -1) for row in scores.rows()]
                found |= {one: tuple(column[at] for column in columns) for at, one in enumerate(wanted)}
                distances = {one: _distance(rows, columns) for one, columns in found.items()}
                before, least = least, min(distances.values())
                wanted = next_round(distances) if least < CLOSER * before else ()
            wanted = from_first(wanted, self.group)
            if not wanted:
                break
        return found

    def _ask_engines(
        self, chosen: Chosen, *, policy_version: int, left_out: bool
    ) -> tuple[tuple[Again, ...], tuple[Again, ...]]:
        """Every engine answers the same prompts, one at a time and then together; the trainer scores the answers."""
        drawn = [at for at, is_drawn in enumerate(chosen.is_drawn) if is_drawn]
        worst = [at for at, is_drawn in enumerate(chosen.is_drawn) if not is_drawn]
        asked = sorted([*worst[: ASKED - min(len(drawn), ASKED // 2)], *drawn[: ASKED // 2]])
        prompts = chosen.rollout.prompts.select(torch.tensor(asked, dtype=torch.int64))
        longest = int(chosen.rollout.responses.lengths[asked].max()) if asked else 1
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, longest, ASKED_TOKENS))
        said: list[list[Rollout | None] | None] = [None, None]
        with self.awake():
            self.recovery.again()  # one may have been lost in the comparison, or before
            for is_last in (False, True):
                # nothing, unless weights were given back or an engine is new
                self.recovery.sync(partial(self.policy_sync.update_weights, policy_version=policy_version))
                if asked and not left_out and self.recovery.is_synced:
                    one_by_one, at_once = prompts.split([1] * len(prompts)), [prompts]
                    said = [
                        old or self._say(new, sampling) for old, new in zip(said, (one_by_one, at_once), strict=True)
                    ]
                if not self.recovery.again(unanswered=not is_last and self.recovery.is_lost):
                    break
        return self._answers(said[0] or (), asked), self._answers(said[1] or (), asked)

    def _say(self, parts: Sequence[PromptBatch], sampling: SamplingConfig) -> list[Rollout | None] | None:
        """What this rank's engine answers, part by part; None where it is lost before all are answered."""
        engine = self.engine
        if engine is None:
            return None
        return self.recovery.guard(lambda: [engine.generate(part if self.leads else None, sampling) for part in parts])

    def _answers(self, mine: Sequence[Rollout | None], asked: Sequence[int]) -> tuple[Again, ...]:
        """Of all engines, scored; on rank 0."""
        parts = gather(Rollout.concat([Rollout.empty(), *(one for one in mine if one is not None)]), self.group)
        all_of_them = Rollout.concat(parts)
        scores = self._score_alone(sequences_of(all_of_them))
        if self.rank:
            return ()
        engines = [(rank, row) for rank, part in enumerate(parts) for row in (asked if len(part) else ())]
        columns = (all_of_them.responses.rows(), all_of_them.rollout_logprobs.rows(), scores.rows())
        return tuple(Again(*place, *tensors) for place, *tensors in zip(engines, *columns, strict=True))

    def _on_first(self, sequences: Sequences, ask: Callable[..., PendingRows[TokenScores]]) -> Ragged:
        """What a role says of rows that rank 0 brings; no rows elsewhere."""
        mine = sequences if self.rank == 0 else Sequences.empty()
        return ask(mine, owners=(0,) * len(sequences)).collect().scores


def _distance(rows: Sequence[ReplayedRow], columns: Sequence[Tensor]) -> float:
    """Mean square between the engine's log-probs and a reading's, over rows that differ."""
    parts = [
        (rows[at].rollout_logprobs - columns[at])[rows[at].counts & rows[at].rollout_logprobs.isfinite()].double()
        for at in differing(rows)
    ]
    both = torch.cat(parts) if parts else torch.empty(0)
    return float(both.square().mean().nan_to_num(nan=float("inf"))) if both.numel() else 0.0
