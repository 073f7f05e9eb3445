"""Engines that are lost are replaced, so that a step goes on with all of its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch.distributed import ProcessGroup

from rlhf.config.rollout import RolloutConfig
from rlhf.dist.agree import gather
from rlhf.errors import EngineLostError, WeightSyncError
from rlhf.rollout.engine import RolloutEngine

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Word:
    """What one rank says after a try."""

    lost: str
    failed: str
    unanswered: bool


class Losses:
    """Engines lost since the job started, and what must follow: the same on all ranks of a group."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        rank: int,
        group: ProcessGroup | None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Keep the parts.

        Args:
            config: What follows a loss.
            rank: This rank of the job.
            group: gloo, over the ranks of actor and engines; None elsewhere, and where no loss is survived.
            say: Shows a line to people; called on all ranks of the group.
        """
        self.group = group if config.on_loss == "replace" else None
        self._most, self._say = config.max_losses, say
        self._leads = rank in [ranks[0] for ranks in config.engines]
        self.num = 0
        """Engines lost so far, over all."""

    def told(self, lost: str) -> str:
        """How this rank's engine was lost, as one of its ranks tells it for all; "" where it was not."""
        return lost if self._leads else ""

    def replace(self, lost: str, start: Callable[[], str]) -> None:
        """Lost engines are started until none is lost. Collective over `group`; other ranks pass through.

        Args:
            lost: How this rank's engine was lost; "" where it was not, and on ranks without one.
            start: Starts it anew, on all its ranks; says how it was lost meanwhile, if it was.

        Raises:
            EngineLostError: More losses than `rollout.max_losses`; on all ranks.
        """
        if self.group is None:
            return
        while all_lost := [text for text in gather(self.told(lost), self.group) if text]:
            self._count(all_lost)
            if lost:
                lost = start()
            # The others wait in the next round, on the CPU, and not in a collective of the next sync.

    def _count(self, lost: Sequence[str]) -> None:
        self.num += len(lost)
        if self.num > self._most:
            raise EngineLostError(
                f"rollout.max_losses: {self.num} engines lost since the job started, {self._most} may be; look for the "
                f"cause, or raise it. The last one:\n{lost[-1]}"
            )
        for text in lost:
            self._say(f"{text.partition(';')[0]}; it is replaced")


class Recovery:
    """Keeps a rank's engine at work. Where `rollout.on_loss` is stop, it communicates nothing, and losses are raised.

    A try is a weight sync, then a call of the engines. An engine that is found lost in either, or before, is left alone
    until all have ended their try; then all ranks concerned learn of it, its ranks start it anew, and there is another
    try for what is missing: the sync, if that failed, and rows that nobody answered.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        losses: Losses,
        engine: RolloutEngine | None,
        seen_lost: Callable[[], EngineLostError | None] = lambda: None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep the parts.

        Args:
            config: What follows a loss.
            losses: Of the job, those of engines' first starts among them.
            engine: This rank's part of its engine; None outside the rollout pool.
            seen_lost: How this rank's engine was lost when the engines were last asked, if it was.
            forget: Called on the ranks of an engine that was started anew: the next sync must bring all.
        """
        self._losses, self._engine = losses, engine
        self._seen_lost, self._forget = seen_lost, forget
        self._replaces = config.on_loss == "replace"
        self._lost = ""
        self._failed: WeightSyncError | None = None

    def go(self, update: Callable[[], S | None], ask: Callable[[S | None], T | None]) -> tuple[S | None, T]:
        """Tries until everybody has its responses. Collective over the pools of actor and engines.

        Args:
            update: The weight sync; all ranks that it concerns call it in every try.
            ask: The engines, given what the sync came to, on all ranks of the pool, also those of a lost engine
                (`is_lost`): the others answer for it. None on all leaders, or EngineLostError, where all engines were
                lost before all was answered.

        Returns:
            What the sync of the last try came to, and the answer.

        Raises:
            EngineLostError, WeightSyncError: See `again`.
        """
        while True:
            synced, answer = self.sync(update), None
            if self._failed is None:
                answer = self._answer(partial(ask, synced))
            if not self.again(unanswered=answer is None):
                assert answer is not None, "without an answer there is another try, or an error"
                return synced, answer

    def _answer(self, ask: Callable[[], T | None]) -> T | None:
        try:
            answer = ask()
        except EngineLostError:
            if not self._replaces:
                raise
            answer = None
        if (error := self._seen_lost()) is not None:
            self.note(error)
        return answer

    @property
    def num_losses(self) -> int:
        """Engines lost since the job started, over all; the same on all ranks of actor and engines."""
        return self._losses.num

    @property
    def is_synced(self) -> bool:
        """The last `sync` did not fail; the same on all ranks that took part in it."""
        return self._failed is None

    @property
    def is_lost(self) -> bool:
        """This rank's engine can be asked nothing; the same on all its ranks."""
        return bool(self._lost)

    def guard(self, work: Callable[[], T]) -> T | None:
        """Something with this rank's engine, on all its ranks; None where it is lost, or is lost meanwhile."""
        if self._lost:
            return None
        try:
            return work()
        except EngineLostError as error:
            self.note(error)
            return None

    def note(self, error: EngineLostError) -> None:
        """This rank's engine is lost; on all its ranks. Raises the error where losses are not survived."""
        if not self._replaces:
            raise error
        self._lost = str(error)

    def sync(self, update: Callable[[], T]) -> T | None:
        """The sync of a try; None where it failed because an engine was lost, on all ranks that take part in it.

        A lost engine's ranks take part as well: the others wait for their share.
        """
        self._failed = None
        try:
            return update()
        except EngineLostError as error:
            self.note(error)
        except WeightSyncError as error:
            if not self._replaces:
                raise
            self._failed = error
            if self._engine is not None:
                self.guard(self._engine.check)
        return None

    def again(self, *, unanswered: bool = False) -> bool:
        """After a try: whether there must be another.

        Collective over the pools of actor and engines; other ranks always get False.

        Lost engines have been started anew when this returns, and have no weights; one that is lost in its start counts
        once more.

        Args:
            unanswered: This rank still wants responses.

        Raises:
            EngineLostError: More losses than `rollout.max_losses`; on all ranks.
            WeightSyncError: The sync failed and no engine was lost; on all ranks.
        """
        group = self._losses.group
        if group is None:
            return False
        failed = "" if self._failed is None else str(self._failed)
        found = gather(_Word(self._losses.told(self._lost), failed, unanswered), group)
        if any(word.lost for word in found):
            self._losses.replace(self._lost, self._restart)
            return any(word.failed or word.unanswered for word in found)
        if self._failed is not None:
            raise self._failed
        return False

    def _restart(self) -> str:
        assert self._engine is not None, "ranks of a lost engine have a part of it"
        self._lost = ""
        self.guard(self._engine.restart)
        self._forget()
        return self._lost
