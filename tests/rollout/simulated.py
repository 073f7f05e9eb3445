"""Engines without a model, on a clock of their own: what a pool makes of them can be seen in milliseconds."""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rlhf.data.batch import FinishReason, PromptBatch, Provenance, Rollout
from rlhf.data.ragged import Ragged
from rlhf.rollout.answers import Asked
from rlhf.rollout.claims import Claims
from rlhf.rollout.feed import Feed, Load, Verdict, Work
from rlhf.rollout.pool_feed import PoolFeed, Question
from rlhf.rollout.routes import Queue, bucket_routes, dynamic_routes

LOOK = 4
"""Steps of an engine between two looks at its feed, unless a row ends before."""


@dataclass(slots=True)
class _Row:
    work: Work
    place: int
    length: int
    begun: int
    sampled: int = 0

    @property
    def left(self) -> int:
        """Tokens still to come."""
        return self.length - self.begun - self.sampled

    @property
    def kv_tokens(self) -> int:
        """Of keys and values, once it has ended; no prompt is shared."""
        return int(self.work.prompts.tokens.lengths[self.place]) + self.length


def _rollout(rows: Sequence[_Row], reason: FinishReason, version: int) -> Rollout:
    """Rows as an engine gives them back; token i of sample s is s * 1000 + i, and keeps the version it came with."""
    counts = [row.begun + row.sampled for row in rows]
    prompts = PromptBatch.concat([row.work.prompts.select(torch.tensor([row.place])) for row in rows])
    first = prompts.sample_ids.repeat_interleave(torch.tensor(counts)) * 1000
    tokens = Ragged(first + torch.cat([torch.arange(count) for count in counts]), torch.tensor(counts))
    return Rollout(
        prompts,
        tokens,
        tokens.like(-tokens.values.float()),
        torch.full((len(rows),), reason, dtype=torch.int8),
        tokens.like(torch.full_like(tokens.values, Provenance.SAMPLED, dtype=torch.uint8)),
        tokens.like(torch.cat([_versions(row, version) for row in rows])),
    )


def _versions(row: _Row, version: int) -> torch.Tensor:
    """Of a row's tokens."""
    new = torch.full((row.sampled,), version, dtype=torch.int32)
    return new if row.work.begun is None else torch.cat([row.work.begun.policy_versions.rows()[row.place], new])


@dataclass(slots=True)
class SimulatedEngine:
    """Works like the real ones: in each round `done`, `verdict`, `take`, then a few tokens for each running row."""

    feed: Feed
    lengths: Mapping[int, int]
    """Tokens of the response to each sample; known to nobody else."""
    slots: int
    kv_tokens: int = 10**9
    """Room for keys and values; a row enters once there is room for it until its end, all others behind it."""
    max_new_tokens: int = 1000
    version: int = 0
    prefill_speed: int = 64
    """Prompt tokens computed in the time of one step."""
    running: list[_Row] = field(default_factory=list)
    waiting: deque[_Row] = field(default_factory=deque)
    ended: list[_Row] = field(default_factory=list)
    over: bool = False
    busy: float = 0.0
    """Steps in which a row was worked on."""

    def round(self) -> float:
        """One round of the engine; how many steps' time it took, LOOK at most."""
        if self.ended:
            self.feed.done(_rollout(self.ended, FinishReason.STOP, self.version))
            self.ended = []
        verdict = self.feed.verdict()
        if verdict is Verdict.ABORT:
            rows = [*self.running, *self.waiting]
            self.running, self.waiting = [], deque()
            if rows:
                self.feed.done(_rollout(rows, FinishReason.ABORT, self.version))
        if verdict is Verdict.GO_ON:
            self._take()
        prefilled = self._let_in()
        self.over = verdict is not Verdict.GO_ON and not self.running
        if not self.running:
            return 1.0
        steps = max(0, min(LOOK, *(row.left for row in self.running)))
        for row in self.running:
            row.sampled += steps
        self.ended = [row for row in self.running if row.left <= 0]
        self.running = [row for row in self.running if row.left > 0]
        time = steps + prefilled / self.prefill_speed
        self.busy += time
        return time

    def _take(self) -> None:
        while len(self.running) + len(self.waiting) < self.slots:
            rows = [*self.running, *self.waiting]
            left = sum(self.max_new_tokens - row.begun - row.sampled for row in rows)
            work = self.feed.take(Load(len(rows), left))
            if work is None:
                return
            begun = [0] * len(work.prompts) if work.begun is None else work.begun.responses.lengths.tolist()
            for place, sample_id in enumerate(work.prompts.sample_ids.tolist()):
                self.waiting.append(_Row(work, place, self.lengths[sample_id], begun[place]))

    def _let_in(self) -> int:
        """Prompt tokens computed for rows that enter."""
        computed = set[tuple[int, int]]()
        held = sum(row.kv_tokens for row in self.running)
        while self.waiting and len(self.running) < self.slots:
            held += self.waiting[0].kv_tokens
            if self.running and held > self.kv_tokens:
                break
            row = self.waiting.popleft()
            self.running.append(row)
            computed.add((int(row.work.prompts.prompt_ids[row.place]), int(row.work.prompts.tokens.lengths[row.place])))
        return sum(length for _, length in computed)


def asked_rows(prompt_lengths: Sequence[int], samples: int, *, prefix: Sequence[int] = ()) -> Asked:
    """Prompt p is prefix + its own tokens; sample k of it has id p * samples + k."""
    prompts = [
        torch.cat([torch.tensor(prefix, dtype=torch.int64), torch.full((length,), 10 + at)])
        for at, length in enumerate(prompt_lengths)
    ]
    rows = [prompt for prompt in prompts for _ in range(samples)]
    ids = torch.arange(len(rows))
    return Asked(ids, ids // samples, Ragged.of(rows, dtype=torch.int64))


def pool_of(
    question: Question,
    num_engines: int,
    *,
    slots: int,
    kv_tokens: int = 10**9,
    batching: str = "dynamic",
    edges: Sequence[int] = (64, 256),
    clock: "Clock",
) -> list[PoolFeed]:
    """A feed for each engine, over one store."""
    store = dist.HashStore()
    if batching == "dynamic":
        queues: tuple[Queue, ...] = dynamic_routes(question.groups, num_engines)
    else:
        queues = bucket_routes(question.groups, num_engines, edges=edges, max_rows=slots, max_tokens=kv_tokens)
    for number in range(num_engines):
        Claims.open(store, number)
    return [
        PoolFeed(question, Claims(store, queues, mine=number), slots, kv_tokens, batching == "buckets", clock.read)
        for number in range(num_engines)
    ]


@dataclass(slots=True)
class Clock:
    """Time in seconds; a step takes `step_s`."""

    step_s: float = 0.02
    steps: float = 0.0

    def read(self) -> float:
        return self.steps * self.step_s


def run_side_by_side(engines: Sequence[SimulatedEngine], clock: Clock, *, starts: Sequence[float] = ()) -> float:
    """All engines until each is over, on one clock; steps that passed."""
    starts = starts or [0.0] * len(engines)
    due = [(start, number) for number, start in enumerate(starts)]
    heapq.heapify(due)
    while due:
        clock.steps, number = heapq.heappop(due)
        time = engines[number].round()
        if not engines[number].over:
            heapq.heappush(due, (clock.steps + time, number))
    return clock.steps
