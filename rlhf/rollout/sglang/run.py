"""One run of an SGLang engine over a feed, on its leader rank: what goes to the host process, what comes back."""

from collections import Counter, deque
from collections.abc import Callable
from math import isfinite

import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason
from rlhf.errors import EngineError
from rlhf.rollout.engine import ProgressFn
from rlhf.rollout.feed import Feed, Verdict
from rlhf.rollout.ledger import Ledger, OwedRow
from rlhf.rollout.sglang.life.process import HostProcess
from rlhf.rollout.sglang.responses import answer_of, report_times
from rlhf.rollout.sglang.server_args import sampling_args
from rlhf.rollout.sglang.wire import Answers, Ask, Beat, Reply, Response, pack_tokens

ROUND_S = 0.02
"""The longest that a feed is not asked while responses grow."""
POLL_S = 0.003
"""The same while the engine has nothing to do."""
SURPLUS = 4
"""Rows beyond max_running that SGLang has waiting, so that a slot that falls free is taken at its next step: this many,
or a quarter of max_running, since rows of one length end together."""
VERB = "sample"


class Run:
    """Feeds the host. What SGLang runs and has waiting is bounded; what is beyond that waits here."""

    def __init__(
        self,
        host: HostProcess,
        feed: Feed,
        ledger: Ledger,
        *,
        sampling: SamplingConfig,
        eos_token_ids: tuple[int, ...],
        max_running: int,
        version: str,
        on_progress: ProgressFn | None,
    ) -> None:
        self._host, self._feed, self._ledger = host, feed, ledger
        self._sampling, self._eos_token_ids, self._max_new_tokens = sampling, eos_token_ids, sampling.max_new_tokens
        self._version, self._on_progress = version, on_progress
        self._limit = max_running + max(SURPLUS, max_running // 4)
        self._waiting = deque[Ask]()
        self._at_work: set[int] = set()
        self._new_tokens, self._is_aborting = 0, False

    def go(self) -> None:
        """Until the feed says otherwise; nothing is at work in the host afterwards.

        Raises:
            EngineError: The host is lost, or an answer cannot be trusted. What the feed raises is passed on.
        """
        try:
            self._go()
        except BaseException:
            self._ledger.give_up()
            if self._at_work and self._host.is_open:
                self._abort(lambda _: None)
            raise

    def _go(self) -> None:
        while True:
            self._hand_back()
            verdict = self._feed.verdict()
            if verdict == Verdict.ABORT:
                self._stop()
                return
            if verdict == Verdict.GO_ON:
                self._take()
            self._send()
            if self._at_work:
                self._hear(ROUND_S, self._end)
            elif verdict == Verdict.GO_ON:
                self._hear(POLL_S, self._end)
            else:
                self._hand_back()
                return

    def _take(self) -> None:
        while len(self._waiting) + len(self._at_work) < self._limit:
            work = self._feed.take(self._ledger.load(new_tokens=self._new_tokens))
            if work is None:
                return
            rows = [(row, pack_tokens(row.prompt.tolist())) for row in self._ledger.take(work)]
            count = Counter(prompt for _, prompt in rows)
            self._waiting.extend(self._ask(row, prompt, shares_prompt=count[prompt] > 1) for row, prompt in rows)

    def _send(self) -> None:
        asks = []
        while self._waiting and len(self._at_work) < self._limit:
            asks.append(ask := self._waiting.popleft())
            self._at_work.add(ask.number)
        if asks:
            self._host.tell(VERB, asks)

    def _ask(self, row: OwedRow, prompt: bytes, *, shares_prompt: bool) -> Ask:
        begun = [] if row.begun is None else row.begun.tokens.tolist()
        return Ask(
            number=row.number,
            prompt=prompt,
            begun=pack_tokens(begun),
            sampling=sampling_args(
                self._sampling,
                self._eos_token_ids,
                seed=row.seed,
                prompt_tokens=row.prompt.numel(),
                begun_tokens=len(begun),
            ),
            shares_prompt=shares_prompt,
        )

    def _hear(self, wait_s: float, take_in: Callable[[Response], None]) -> None:
        heard = self._host.hear(wait_s, verb=VERB if self._at_work else "")
        # before any is looked at: one that is refused must not leave others to be waited for, which have come
        responses = [one for told in heard if isinstance(told, Answers) for one in told.responses]
        for response in responses:
            self._at_work.remove(response.number)
        for told in heard:
            if isinstance(told, Beat):
                self._new_tokens = min(told.new_tokens, self._max_new_tokens * len(self._at_work))
            if isinstance(told, Reply) and told.error:
                self._at_work.clear()  # nobody knows what became of them
                raise EngineError(f"sglang engine: {told.error}; see the engine's log")
        for response in responses:
            take_in(response)
        self._report()

    def _end(self, response: Response) -> None:
        row = self._ledger.row(response.number)
        answer = answer_of(
            row,
            response,
            max_new_tokens=self._max_new_tokens,
            version=self._version,
            may_be_aborted=self._is_aborting,
        )
        self._new_tokens = max(0, self._new_tokens - answer.tokens.numel())
        report_times(self._ledger, response)
        self._ledger.end(
            response.number,
            answer.tokens,
            answer.logprobs,
            answer.reason,
            cached_tokens=response.cached_tokens,
            at=response.times.ended if isfinite(response.times.ended) else None,
        )

    def _abort(self, take_in: Callable[[Response], None]) -> None:
        self._is_aborting = True
        self._host.tell("abort")
        while self._at_work:
            self._hear(ROUND_S, take_in)

    def _stop(self) -> None:
        """Give everything back as it is."""
        self._abort(self._end)
        for ask in self._waiting:
            self._ledger.end(ask.number, torch.empty(0, dtype=torch.int64), torch.empty(0), FinishReason.ABORT)
        self._hand_back()

    def _hand_back(self) -> None:
        finished = self._ledger.finished()
        if finished is not None:
            self._feed.done(finished)
            self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._ledger.num_finished, self._ledger.num_taken)
