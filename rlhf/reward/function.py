"""The reward function of a run: calls spread over processes, each call timed, each failure contained in its row."""

import pickle
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rlhf.config.data import RewardConfig
from rlhf.data.record import PromptRecord, RewardResult
from rlhf.errors import ConfigError, RewardError
from rlhf.reward.process import START_LIMIT_S, RewardProcess

TICK_S = 1.0
"""How often a waiting `score` reports that it is alive."""
MAX_FAILED_STARTS = 3
"""A process that worked before and cannot be started so often in a row will not come back."""


class RewardFunction:
    """Scores responses on the rank that owns them. No collective; each owner has processes of its own.

    A call that raises, hangs (in C too), returns no finite number or ends its process costs its own row at most
    timeout_s of one process; the other rows keep their scores.
    """

    def __init__(self, config: RewardConfig, *, log_path: Path | None = None) -> None:
        """Start the processes and wait until the first has loaded the function.

        Args:
            config: Names the function.
            log_path: File that gets what the function prints, at most 64 KiB a call; None drops it.

        Raises:
            ConfigError: The function cannot be loaded.
        """
        self.config = config
        self.failed_starts = 0
        self.processes = [RewardProcess(config, log_path) for _ in range(config.workers)]
        try:
            self._await_first()
        except ConfigError:
            self.close()
            raise

    def score(
        self, records: Sequence[PromptRecord], texts: Sequence[str], *, tick: Callable[[], None] = lambda: None
    ) -> list[RewardResult]:
        """Results in the order of the rows; a failed row has an error and score 0.

        Args:
            records: One for each response.
            texts: Response texts, special tokens left out.
            tick: Called at least every second or so while waiting, for the progress clock.

        Raises:
            RewardError: A row failed and reward.on_error is fail; or the processes cannot be started any more.
        """
        assert len(records) == len(texts), f"{len(records)} records for {len(texts)} responses"
        assert self.processes, "score after close"
        results: dict[int, RewardResult] = {}
        waiting = deque(range(len(texts)))
        for process in self.processes:
            if process.dead:  # between two calls: nobody's row
                process.restart()
        while len(results) < len(texts):
            for process in self.processes:
                self._hand_out(process, waiting, records, texts, results)
            for process in self._active():
                self._advance(process, results)
            tick()
        if self.config.on_error == "fail":
            self._fail_on_error(results, records)
        return [results[row] for row in range(len(texts))]

    def keeps(self, result: RewardResult) -> bool:
        """Whether the row of a result takes part in the losses: it does unless it failed and on_error is drop."""
        return not result.error or self.config.on_error == "zero"

    def close(self) -> None:
        """End the processes. May be called twice."""
        for process in self.processes:
            process.end()
        self.processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_first(self) -> None:
        while not any(process.ready for process in self.processes):
            for process in self._active():
                why = self._started(process)
                if why:
                    raise ConfigError(
                        f"reward.function: {self.config.function} cannot be loaded ({why}); needs "
                        "package.module:function or path/to/file.py:function; change it, or mend the module"
                    )

    @staticmethod
    def _hand_out(
        process: RewardProcess,
        waiting: deque[int],
        records: Sequence[PromptRecord],
        texts: Sequence[str],
        results: dict[int, RewardResult],
    ) -> None:
        while process.ready and process.row is None and waiting:
            row = waiting.popleft()
            record = records[row]
            try:
                process.submit(row, (record.text, record.answer, record.entry, texts[row]))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                results[row] = RewardResult(0.0, error=f"its record cannot be sent to the reward process: {error}")

    def _active(self) -> list[RewardProcess]:
        """Processes that have something to say or to be told, or whose time is up; waits for one at most TICK_S."""
        now = time.monotonic()
        pending = [p for p in self.processes if p.row is not None or not p.ready]
        with selectors.DefaultSelector() as selector:
            for process in pending:
                wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.outbox else 0)
                selector.register(process.channel, wants, process)
            wait = min([TICK_S, *(p.deadline - now for p in pending)])
            events = selector.select(max(wait, 0.0)) if pending else []
        active = []
        for key, what in events:
            if what & selectors.EVENT_WRITE:
                key.data.send()
            if what & selectors.EVENT_READ:
                active.append(key.data)
        now = time.monotonic()
        return active + [p for p in pending if p.deadline <= now and p not in active]

    def _advance(self, process: RewardProcess, results: dict[int, RewardResult]) -> None:
        """Take a process's answer, or its death, or end it when its time is up."""
        if not process.ready:
            why = self._started(process)
            if why:
                self.failed_starts += 1
                if self.failed_starts >= MAX_FAILED_STARTS:
                    raise RewardError(
                        f"reward.function: {self.config.function} was loaded before, but now {self.failed_starts} "
                        f"starts failed in a row ({why}); mend the module"
                    )
                process.restart()
            return
        row = process.row
        assert row is not None, "a ready process without a row is not waited for"
        try:
            outcome = process.receive()
        except EOFError:
            results[row] = RewardResult(0.0, error=process.death())
            process.restart()
            return
        if outcome is not None:
            results[row], process.row = RewardResult(*outcome), None
        elif time.monotonic() >= process.deadline:
            results[row] = RewardResult(0.0, error=f"no answer within {self.config.timeout_s:g} s")
            process.restart()

    def _started(self, process: RewardProcess) -> str:
        """Take a starting process's word; gives why it failed, or nothing while it has not."""
        try:
            word = process.receive()
        except EOFError:
            return process.death()
        if word is None:
            return f"not loaded within {START_LIMIT_S:g} s" if time.monotonic() >= process.deadline else ""
        if word[0] == "failed":
            return str(word[1])
        process.ready, self.failed_starts = True, 0
        return ""

    def _fail_on_error(self, results: dict[int, RewardResult], records: Sequence[PromptRecord]) -> None:
        for row, result in sorted(results.items()):
            if result.error:
                raise RewardError(
                    f"reward.function: {self.config.function}: {result.error}; for the prompt "
                    f"{records[row].text!r:.200}; mend it, or set reward.on_error=drop"
                )
