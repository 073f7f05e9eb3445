"""All engines of a job as one: rows go to whichever engine is free, and come back to the leader that asked.

Knows no trainer. One object on each rank of the rollout pool, over its engine; leaders talk to one another.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import PromptBatch, Rollout
from rlhf.data.exchange import Exchange, RowPlan, TableT
from rlhf.dist.agree import gather
from rlhf.errors import EngineError, EngineLostError
from rlhf.rollout.answers import Answers, Asked
from rlhf.rollout.claims import Claims
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.pool_feed import POLL_S, PoolFeed, Question
from rlhf.rollout.pool_stats import PoolPart, PoolStats
from rlhf.rollout.routes import Queue, bucket_routes, dynamic_routes, joined

_TAG = 2


@dataclass(frozen=True, slots=True)
class PoolReply:
    """What a call came to, on a leader."""

    kept: tuple[int, ...]
    """Prompt ids of the groups that are answered, ascending; the same on all leaders."""
    answers: Answers
    """Rows of kept groups that this leader is to have."""
    left: tuple[int, ...]
    """Prompt ids of the other groups, ascending; the same on all leaders."""
    begun: Answers
    """Responses so far to rows of the other groups; each is at one leader."""
    stats: PoolStats


@dataclass(frozen=True, slots=True)
class _Hello:
    """What a leader brings to a call."""

    asked: int
    begun: int
    takes_part: bool
    is_lost: bool


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of a call at one leader."""

    place: dict[int, int]
    """Of each group that became whole at its engine."""
    stopped: tuple[int, ...]
    """Groups that were stopped there."""
    part: PoolPart
    lost: bool


class EnginePool:
    """This rank's hand in the rollout pool. Its methods are called by all ranks of the pool, in the same order."""

    def __init__(
        self,
        engine: RolloutEngine,
        config: RolloutConfig,
        *,
        rank: int,
        leaders_group: ProcessGroup | None,
        store: Store,
        outlives_loss: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep the parts.

        Args:
            engine: This rank's part of its engine.
            config: Where engines lie, and how rows are batched.
            rank: This rank of the job.
            leaders_group: gloo, over the first ranks of all engines; None elsewhere.
            store: That all leaders reach; keys are this pool's alone.
            outlives_loss: When an engine is lost the others answer its rows; else that is an error.
            on_wait: Called again and again while a leader waits for other engines.
        """
        self.engine, self._config, self._group, self._store = engine, config, leaders_group, store
        self._leaders = tuple(ranks[0] for ranks in config.engines)
        self._number = next(number for number, ranks in enumerate(config.engines) if rank in ranks)
        self._outlives_loss, self._on_wait = outlives_loss, on_wait
        self._num_calls = 0
        self._lengths: dict[SamplingConfig, float] = {}
        """Mean response length of the last call with each sampling; the same on all leaders."""
        self.lost: EngineLostError | None = None
        """What became of this rank's engine in the last call, where it was lost; on all its ranks."""
        self.complete = True
        """Whether the last call answered all that was wanted: not where all engines are lost. On all asked."""

    def generate(
        self,
        prompts: PromptBatch | None,
        sampling: SamplingConfig,
        *,
        attempt: int = 0,
        takes_part: bool = True,
        is_lost: bool = False,
    ) -> Rollout | None:
        """A response to each row, whoever answers it.

        Args:
            prompts: On leaders the rows they own, maybe none; None elsewhere.
            sampling: The same on all ranks.
            attempt: Of `sample_seed`; the same on all ranks.
            takes_part: False where this rank's engine must not be asked; the same on all its ranks.
            is_lost: This rank's engine was lost before; the same on all its ranks. Others answer, if there are any.

        Returns:
            On leaders just those rows, in their order; None elsewhere, and where no engine takes part.

        Raises:
            EngineLostError: All engines are lost, on leaders and all asked; or this rank's, where the pool does not
                outlive that.
        """
        reply = self.ask(prompts, sampling, attempt=attempt, takes_part=takes_part, is_lost=is_lost)
        if not self.complete:
            raise EngineLostError("rollout pool: all engines are lost; needs one; look into the engines' logs")
        if reply is None or prompts is None or not reply.stats.engines:
            return None
        return reply.answers.rollout(prompts)

    def ask(
        self,
        prompts: PromptBatch | None,
        sampling: SamplingConfig,
        *,
        attempt: int = 0,
        takes_part: bool = True,
        is_lost: bool = False,
        keep: int | None = None,
        begun: Answers | None = None,
    ) -> PoolReply | None:
        """Like `generate`, for the first `keep` groups (all samples of a prompt) that are whole; the rest is stopped.

        Args:
            prompts: See `generate`; all rows of a prompt are one leader's.
            sampling: See `generate`.
            attempt: See `generate`.
            takes_part: See `generate`.
            is_lost: See `generate`.
            keep: Groups wanted, over all leaders; None wants all, and rows then come back to the leaders that brought
                them. Else prompt j of the kept ones in ascending order of id, with all its samples, goes to leader
                j % leaders. The same on all ranks.
            begun: On leaders: responses so far to rows of any leader, to be continued or already whole.

        Returns:
            None on ranks that lead no engine. Fewer groups are kept than wanted only where no engine takes part, or all
            that did are lost (`complete`).
        """
        self.lost, self.complete, takes_part = None, True, takes_part and not is_lost
        store = PrefixStore(f"{self._num_calls}", self._store)
        self._num_calls += 1
        if self._group is None:
            if takes_part:
                self._run(None, sampling)
            if self.lost is not None:
                self._wait_until(lambda: store.check(["complete"]))
                self.complete = store.get("complete") == b"1"
            return None
        if prompts is None:
            raise EngineError("rollout pool: no prompts on an engine's leader; needs a PromptBatch, maybe empty")
        Claims.open(store, self._number)
        begun = Answers.empty() if begun is None else begun
        hellos = gather(_Hello(len(prompts), len(begun), takes_part, is_lost), self._group)
        asked = self._to_all(Asked.of(prompts), [hello.asked for hello in hellos])
        question = Question.of(
            asked,
            self._to_all(begun, [hello.begun for hello in hellos]),
            keep=keep,
            attempt=attempt,
            expected_tokens=self._lengths.get(sampling, sampling.max_new_tokens / 2),
            max_new_tokens=sampling.max_new_tokens,
        )
        claims = Claims(store, self._plan(question, [hello.takes_part for hello in hellos]), mine=self._number)
        config = self._config
        feed = PoolFeed(
            question, claims, config.max_running, config.kv_cache_tokens, in_batches=config.batching == "buckets"
        )
        if takes_part:
            self._run(feed, sampling)
        num_engines = sum(hello.takes_part for hello in hellos)
        self._wait_until(lambda: claims.lost() >= num_engines or claims.finished() >= question.keep)
        found = feed.answers()
        outcomes = gather(_Outcome(feed.place, feed.stopped, PoolPart.of(feed), self.lost is not None), self._group)
        lost = sum(outcome.lost for outcome in outcomes)
        self.complete = lost < num_engines or not (lost or any(hello.is_lost for hello in hellos))
        if self._number == 0:
            if lost:
                store.set("complete", str(int(self.complete)))  # for the other ranks of lost engines
            claims.delete()
        return self._settle(question, hellos, outcomes, found, begun, to_askers=keep is None, sampling=sampling)

    def _run(self, feed: PoolFeed | None, sampling: SamplingConfig) -> None:
        try:
            self.engine.run(feed, sampling)
        except EngineLostError as error:
            if not self._outlives_loss:
                raise
            self.lost = error
            if feed is not None:
                feed.give_back()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for other leaders; not in a collective, which would take a long wait for a dead rank."""
        while not is_so():
            self._on_wait()
            time.sleep(POLL_S)

    def _plan(self, question: Question, takes_part: Sequence[bool]) -> list[Queue]:
        """A queue for each engine, empty where it takes no part. One engine alone gets all at once."""
        engines = [number for number, takes in enumerate(takes_part) if takes]
        queues: list[Queue] = [()] * len(takes_part)
        if not engines:
            return queues
        if self._config.batching == "buckets":
            planned = bucket_routes(
                question.groups,
                len(engines),
                edges=self._config.bucket_tokens,
                max_rows=self._config.max_running,
                max_tokens=self._config.kv_cache_tokens,
            )
        else:
            planned = dynamic_routes(question.groups, len(engines))
        if len(engines) == 1 and self._config.batching == "dynamic":
            (queue,) = planned
            planned = ((joined(queue),),) if queue else planned
        for number, queue in zip(engines, planned, strict=True):
            queues[number] = queue
        return queues

    def _settle(
        self,
        question: Question,
        hellos: Sequence[_Hello],
        outcomes: Sequence[_Outcome],
        found: Answers,
        begun: Answers,
        *,
        to_askers: bool,
        sampling: SamplingConfig,
    ) -> PoolReply:
        """Which groups are kept, and their rows to those who are to have them."""
        stats = PoolStats.of(
            [outcome.part for outcome in outcomes],
            engines=sum(hello.takes_part for hello in hellos),
            lost_engines=sum(outcome.lost for outcome in outcomes),
        )
        self._lengths[sampling] = stats.mean_response_tokens or self._lengths.get(sampling, sampling.max_new_tokens / 2)
        place = {at: (number, p) for number, outcome in enumerate(outcomes) for at, p in outcome.place.items()}
        ids = [int(question.asked.prompt_ids[rows[0]]) for rows in question.rows]
        kept = sorted((at for at, (_, p) in place.items() if p <= question.keep), key=ids.__getitem__)
        asker = [number for number, hello in enumerate(hellos) for _ in range(hello.asked)]
        moves: list[tuple[int, int, int]] = []  # row, answered by, goes to
        for j, at in enumerate(kept):
            for row in question.rows[at].tolist():
                moves.append((row, place[at][0], asker[row] if to_askers else j % len(self._leaders)))
        if to_askers:
            moves.sort()
        rows = torch.tensor([row for row, _, _ in moves], dtype=torch.int64)
        plan = RowPlan(
            tuple(self._leaders[source] for _, source, _ in moves),
            tuple((self._leaders[target],) for _, _, target in moves),
        )
        held = question.asked.sample_ids[rows[torch.tensor([s == self._number for _, s, _ in moves], dtype=torch.bool)]]
        others = ~torch.isin(found.sample_ids, held)
        touched = {ids[at] for outcome in outcomes for at in (*outcome.place, *outcome.stopped)}
        still = torch.tensor([prompt_id not in touched for prompt_id in begun.prompt_ids.tolist()], dtype=torch.bool)
        return PoolReply(
            kept=tuple(ids[at] for at in kept),
            answers=self._exchange(found.ordered_as(held), plan),
            left=tuple(sorted(set(ids) - {ids[at] for at in kept})),
            begun=Answers.concat([found.select(others.nonzero().flatten()), begun.select(still.nonzero().flatten())]),
            stats=stats,
        )

    def _to_all(self, rows: TableT, counts: Sequence[int]) -> TableT:
        """The rows of all leaders, in the order of leaders."""
        sources = tuple(leader for leader, count in zip(self._leaders, counts, strict=True) for _ in range(count))
        return self._exchange(rows, RowPlan(sources, (self._leaders,) * len(sources)))

    def _exchange(self, rows: TableT, plan: RowPlan) -> TableT:
        assert self._group is not None, "leaders exchange rows"
        under_way = Exchange(rows, plan, group=self._group, tag=_TAG)
        received = under_way.receive()
        for message in under_way.sent:
            message.wait()
        return received


def store_of_job(purpose: str) -> Store:
    """Keys of this purpose in the store that the job's ranks met in; reached by all of them.

    torch has no public name for it; a store of our own would be one more port.
    """
    return PrefixStore(purpose, dist.distributed_c10d._get_default_store())
