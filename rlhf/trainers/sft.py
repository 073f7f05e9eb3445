"""Supervised fine-tuning: cross entropy on the answers. Every rank runs every line."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from rlhf.config.run import SFTRunConfig
from rlhf.data.batch import PolicyRows, Sequences
from rlhf.data.prompts import AnswerSource
from rlhf.data.ragged import Ragged
from rlhf.dist.agree import sum_of
from rlhf.dist.stop_request import StopRequest
from rlhf.errors import CheckpointError
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.mcore.train_step import StepReport, train_step
from rlhf.metrics.earlier import EarlierPart
from rlhf.metrics.names import ClockMetrics, SFTMetrics, StepMetrics
from rlhf.metrics.reduce import reduce_over_ranks
from rlhf.metrics.report import FinalReport
from rlhf.metrics.run_folder import Summary
from rlhf.metrics.series import RunSeries, read_metrics
from rlhf.metrics.timers import Timers
from rlhf.trainers.checkpointing import Checkpoints
from rlhf.trainers.losses import make_answer_loss
from rlhf.trainers.profiler import StepProfiler
from rlhf.trainers.reporter import NAN, Desk


@dataclass(frozen=True, slots=True)
class SFTState:
    """The state between two steps."""

    step: int = 0
    """Steps done: the rows of the next one follow from it."""

    def to_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(plain: Mapping[str, object]) -> "SFTState":
        """Inverse of to_dict.

        Raises:
            CheckpointError: It is of another loop.
        """
        step = plain.get("step")
        if plain.keys() != {"step"} or not isinstance(step, int):
            raise CheckpointError(f"state: {dict(plain)} given; needs the step of an SFT run; take its checkpoint")
        return SFTState(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTLoop:
    """The loop and all that it needs; built by rlhf.build. Every rank of the job holds a part of the model."""

    config: SFTRunConfig
    model: MegatronModel
    optimizer: Optimizer
    answers: AnswerSource
    group: ProcessGroup
    """gloo, over all ranks of the job."""
    stop: StopRequest
    timers: Timers
    profiler: StepProfiler
    save: Callable[[], None]
    """Writes the model as a Hugging Face checkpoint. Collective over the job."""
    save_folder: Path
    """Where to."""
    start: SFTState
    """Before the first step of this start of the run."""
    checkpoints: Checkpoints
    desk: Desk | None
    """On rank 0."""

    def run(self) -> None:
        """All steps, then the model as a Hugging Face checkpoint. A stop request ends it between two."""
        earlier = self.desk.earlier if self.desk is not None else EarlierPart()
        began, losses = time.monotonic() - earlier.seconds, list(earlier.losses)
        state, last = self.start, self.config.num_steps
        with self.checkpoints, self.desk.display if self.desk else nullcontext():
            while state.step < last and not self.stop.agreed(self.group):
                with self.profiler.step(state.step + 1), self.timers.phase("step"):
                    report = self.step(state.step)
                state = SFTState(state.step + 1)
                losses.append(report.stats["nll_sum"] / max(1.0, report.stats["target_tokens"]))
                self._report(state.step, report, loss=losses[-1], began=began)
                self.checkpoints.step_done(state)
            self.checkpoints.finish(state)
            with self.timers.phase("save"):
                self.save()
            if self.desk is not None:
                self._close(self.desk, state.step, losses, time.monotonic() - began)

    def step(self, step: int) -> StepReport:
        """One optimizer step on the step's rows."""
        groups, cpu_dp = self.model.groups, self.model.groups.cpu_dp
        assert cpu_dp is not None, "every rank of an SFT run is in the actor's pool"
        rows = answer_rows(self.answers.rows_of(step, groups.dp_rank, groups.grid.size("dp")))
        counted = sum_of(float(rows.loss_mask.values.sum()), cpu_dp)
        return train_step(
            self.model,
            self.optimizer,
            rows,
            make_answer_loss(max(1.0, counted)),
            microbatch_tokens=self.config.actor.microbatch_tokens,
            temperature=1.0,
        )

    def _report(self, step: int, report: StepReport, *, loss: float, began: float) -> None:
        time_spent = reduce_over_ranks(self.timers.drain(), self.group)
        if self.desk is None:
            return
        sft = SFTMetrics(
            loss=loss,
            grad_norm=report.grad_norm,
            clip_factor=report.clip_factor,
            lr=report.lr,
            skipped_steps=float(report.skipped),
        )
        clock = ClockMetrics(seconds=time.monotonic() - began)
        self.desk.sinks.write(step, StepMetrics(sft=sft, clock=clock, time=time_spent).flatten())

    def _close(self, desk: Desk, steps: int, losses: list[float], seconds: float) -> None:
        from rlhf.metrics.curves import draw_curves  # noqa: PLC0415  # matplotlib takes a second, and rank 0 alone draws

        desk.sinks.close()
        more = {"loss_first": losses[0], "loss_last": losses[-1]} if losses else {}
        desk.folder.write_summary(
            Summary(
                steps=steps,
                seconds=seconds,
                held_out_before=NAN,
                held_out_after=NAN,
                reward_first=NAN,
                reward_last=NAN,
                more=more,
            )
        )
        draw_curves([RunSeries(self.config.name, read_metrics(desk.folder.metrics))], desk.folder.curves)
        report = FinalReport(
            run_folder=desk.folder.path,
            steps=steps,
            seconds=seconds,
            losses=losses,
            model=str(self.save_folder),
            next_command=self.config.log.next_command,
        )
        desk.display.note(report.text())


def answer_rows(sequences: Sequences) -> PolicyRows:
    """Rows whose every response token counts."""
    lengths = sequences.response_lengths
    total = int(lengths.sum())
    zeros = Ragged(torch.zeros(total), lengths)
    return PolicyRows(sequences, zeros, zeros, Ragged(torch.ones(total, dtype=torch.bool), lengths))
