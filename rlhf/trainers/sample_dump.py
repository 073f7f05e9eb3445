"""Every N steps all rows of the step into one Parquet file: sent to rank 0 by their owners, written beside the run."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
from pyarrow import parquet
from torch.distributed import ProcessGroup

from rlhf.data.batch import Experience
from rlhf.data.exchange import Exchange, Message, RowPlan
from rlhf.metrics.run_folder import RunFolder
from rlhf.trainers.sample_table import SampleRows
from rlhf.trainers.scoring import Scorer

TAG = 0  # and 1; role calls use those from 2 on


class SampleDump:
    """A context manager around the run. Every rank of the job makes the same calls.

    Owners send and go on; rank 0 waits for the rows, then goes on too while a thread writes them. What fails to be
    written is told and costs that file, never the run.
    """

    def __init__(
        self,
        every_steps: int,
        *,
        rank: int,
        group: ProcessGroup,
        scorer: Scorer | None,
        folder: RunFolder,
        on_failure: Callable[[str], None],
    ) -> None:
        """`group`: gloo, over all ranks of the job. `scorer`: None on ranks that own no rows."""
        self._every, self._rank, self._group, self._scorer = every_steps, rank, group, scorer
        self._folder, self._on_failure = folder, on_failure
        self._leaving: list[Message] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._settle()
            self._writer.shutdown()

    def step_done(self, step: int, experience: Experience, *, owners: tuple[int, ...]) -> None:
        """Dump the step (counted from 1) when it is due. `owners[i]` is the rank that holds row i of the batch."""
        if not self._every or step % self._every:
            return
        self._settle()
        texts = self._scorer.texts(experience.scored.rollout) if self._scorer else []
        plan = RowPlan(owners, ((0,),) * len(owners))
        exchange = Exchange(SampleRows.of(experience, texts), plan, group=self._group, tag=TAG)
        self._leaving.extend(exchange.sent)
        if self._rank == 0:
            self._writing = self._writer.submit(self._write, step, exchange.receive())

    def _settle(self) -> None:
        """Wait until the last dump has left this rank and is written."""
        for message in self._leaving:
            message.wait()
        self._leaving.clear()
        if self._writing is not None:
            self._writing.result()

    def _write(self, step: int, rows: SampleRows) -> None:
        path = self._folder.sample_dump(step)
        try:
            path.parent.mkdir(exist_ok=True)
            _write_parquet(rows.to_arrow(step), path)
        except (OSError, pa.ArrowException) as error:
            self._on_failure(f"{path}: not written ({type(error).__name__}: {error}); the run goes on")


def _write_parquet(table: pa.Table, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    parquet.write_table(table, part, compression="zstd")
    part.replace(path)
