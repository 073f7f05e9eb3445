"""What a run tells the world: a line a step, samples, the live display, and the report at its end.

Every rank makes the same calls; each brings its part, rank 0 writes.
"""

import logging
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from torch.distributed import ProcessGroup

from rlhf.config.run import PPORunConfig
from rlhf.data.batch import ScoredRollout
from rlhf.dist.agree import gather
from rlhf.dist.stop_request import StopRequest
from rlhf.metrics.console import ProgressDisplay
from rlhf.metrics.earlier import EarlierPart, HeldOutRecord
from rlhf.metrics.names import ClockMetrics, HeldOutMetrics, StepMetrics
from rlhf.metrics.report import BeforeAfter, FinalReport
from rlhf.metrics.run_folder import RunFolder, SampleRecord, Summary
from rlhf.metrics.series import RunSeries, read_metrics
from rlhf.metrics.sinks import SinkSet
from rlhf.metrics.timers import Timers
from rlhf.reshard.stats import ReshardStats
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.evaluation import EvaluationResult, sample_records
from rlhf.trainers.scoring import WRONG_WEIGHTS, Scorer
from rlhf.trainers.step_stats import StepPart, combine

log = logging.getLogger(__name__)

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Desk:
    """What rank 0 writes to."""

    folder: RunFolder
    sinks: SinkSet
    """Files and trackers, the display among them."""
    display: ProgressDisplay
    earlier: EarlierPart
    """What the run has done before this start of it."""


class Reporter:
    """Gathers and reports. Collective over the job, as a context manager around the run too."""

    def __init__(
        self,
        config: PPORunConfig,
        *,
        rank: int,
        group: ProcessGroup,
        timers: Timers,
        stop: StopRequest,
        scorer: Scorer | None,
        desk: Desk | None,
    ) -> None:
        """`group`: gloo, over all ranks of the job. `desk`: on rank 0, None elsewhere."""
        self._config, self._rank, self._group = config, rank, group
        self._timers, self._stop, self._scorer, self._desk = timers, stop, scorer, desk
        earlier = desk.earlier if desk is not None else EarlierPart()
        self._began = time.monotonic() - earlier.seconds
        self._steps_done = earlier.steps
        self._rewards = list(earlier.rewards)
        self._failed_steps = 0
        self._is_told = False
        """That samples cannot be written."""
        self._before = _result(earlier.before)
        self._after = _result(earlier.after)

    def __enter__(self) -> Self:
        if self._desk is not None:
            self._desk.display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._desk is None:
            return
        self._desk.display.__exit__(kind, error, trace)
        if kind is None:
            self._close(self._desk)

    def stop_agreed(self) -> bool:
        """True on all ranks when a stop was requested."""
        return self._stop.agreed(self._group)

    def started(self, held_out: EvaluationResult | None, *, step: int) -> None:
        """Report the state before the first step; None when it was not evaluated, or by an earlier start of the run.

        `step`: 0, or that of another run's checkpoint, from which this one begins.
        """
        self._timers.drain()
        if held_out is None:
            return
        self._before = held_out
        if self._desk is not None:
            metrics = StepMetrics(clock=self._clock(), held_out=_held_out(held_out))
            self._desk.sinks.write(step, metrics.flatten())
            self._add_samples(self._desk, list(held_out.samples))

    def step_done(
        self, state: DriverState, part: StepPart, scored: ScoredRollout, held_out: EvaluationResult | None
    ) -> None:
        """Report the step that began with a state; in reports steps are counted from 1."""
        step = state.step + 1
        errors = (result.error for result in scored.results)
        failure = next((error for error in errors if error and error != WRONG_WEIGHTS), "")
        part = replace(part, seconds=self._timers.drain(), failure=failure)
        shown = self._config.log.samples_per_step
        records = sample_records(scored, self._scorer, count=shown, step=step, split="train") if self._scorer else []
        everywhere = gather((part, records), self._group)
        if held_out is not None:
            self._after = held_out
        if self._desk is None:
            return
        metrics = replace(combine({rank: p for rank, (p, _) in enumerate(everywhere)}, state), clock=self._clock())
        if held_out is not None:
            metrics = replace(metrics, held_out=_held_out(held_out))
        self._note_sync(step, next((p.sync for p, _ in everywhere if p.sync), None))
        self._note_failures(step, metrics, [p.failure for p, _ in everywhere if p.failure])
        self._steps_done = step
        self._rewards.append(metrics.reward.mean if metrics.reward else NAN)
        self._desk.sinks.write(step, metrics.flatten())
        train = [record for _, rows in everywhere for record in rows][:shown]
        self._add_samples(self._desk, train + list(held_out.samples if held_out else ()))

    def _add_samples(self, desk: Desk, records: list[SampleRecord]) -> None:
        """They are for people to read: like a step's metrics, those that cannot be written do not end the run."""
        try:
            desk.folder.add_samples(records)
        except OSError as error:
            if not self._is_told:
                desk.display.note(f"{desk.folder.samples}: samples are not written ({error}); the run goes on")
            self._is_told = True

    def _clock(self) -> ClockMetrics:
        return ClockMetrics(seconds=time.monotonic() - self._began)

    def _note_sync(self, step: int, sync: ReshardStats | None) -> None:
        """Say on the console that engines did not hold what they were given."""
        if sync is None or not sync.differed or self._desk is None:
            return
        out = len(sync.left_out)
        fate = f"{out} engines are wrong even so and left out of this step" if out else "then both sides were equal"
        self._desk.display.note(
            f"step {step}: after the weight sync {sync.differed}; all was sent again, {fate} (sync.on_mismatch)"
        )

    def _note_failures(self, step: int, metrics: StepMetrics, failures: list[str]) -> None:
        """Say on the console that rewards fail: at the first step that has any, then ever more rarely."""
        if not failures or self._desk is None or metrics.reward is None:
            return
        self._failed_steps += 1
        if self._failed_steps & (self._failed_steps - 1):  # not 1, 2, 4, 8, ...
            return
        fate = "count as 0" if self._config.reward.on_error == "zero" else "are left out of the losses"
        failed, of = metrics.reward.failed, self._config.ppo.samples_per_step
        self._desk.display.note(
            f"step {step}: {failed:.0f} of {of} responses have no score and {fate} (reward.on_error); "
            f"one of them: {failures[0]}"
        )

    def _close(self, desk: Desk) -> None:
        """Summary, curves and the report on the console."""
        from rlhf.metrics.curves import draw_curves  # noqa: PLC0415  # matplotlib takes a second, and rank 0 alone draws

        seconds, before, after = time.monotonic() - self._began, self._before, self._after
        desk.sinks.close()
        desk.folder.write_summary(
            Summary(
                steps=self._steps_done,
                seconds=seconds,
                held_out_before=before.solved if before else NAN,
                held_out_after=after.solved if after else NAN,
                reward_first=self._rewards[0] if self._rewards else NAN,
                reward_last=self._rewards[-1] if self._rewards else NAN,
                more={"held_out_problems": before.problems if before else 0},
            )
        )
        draw_curves([RunSeries(self._config.name, read_metrics(desk.folder.metrics))], desk.folder.curves)
        report = FinalReport(
            run_folder=desk.folder.path,
            steps=self._steps_done,
            seconds=seconds,
            solved_before=before.solved if before else NAN,
            solved_after=after.solved if after else NAN,
            problems=before.problems if before else 0,
            rewards=self._rewards,
            samples=_compare(before, after),
            model=self._config.save_hf,
            next_command=self._config.log.next_command,
        )
        desk.display.note(report.text())


def _held_out(result: EvaluationResult) -> HeldOutMetrics:
    return HeldOutMetrics(
        solved=result.solved, reward=result.reward, pass_at_k=result.pass_at_k, problems=result.problems
    )


def _result(record: HeldOutRecord | None) -> EvaluationResult | None:
    """An evaluation of an earlier start of the run."""
    if record is None:
        return None
    of = record.metrics
    return EvaluationResult(of.solved, of.reward, of.pass_at_k, int(of.problems), record.samples)


def _compare(before: EvaluationResult | None, after: EvaluationResult | None) -> list[BeforeAfter]:
    """The same problems, answered by the first and the last policy."""
    if before is None or after is None:
        return []
    answered = {new.sample_id: new for new in after.samples}  # other ranks may own them after a resume
    return [
        BeforeAfter(
            prompt=old.prompt,
            before=old.response,
            before_reward=old.reward,
            after=answered[old.sample_id].response,
            after_reward=answered[old.sample_id].reward,
        )
        for old in before.samples
        if old.sample_id in answered
    ]
