"""The leader rank's requests at SGLang's engine, in the host process: begun one by one, answered as they end.

Samples of one prompt that arrive together would all compute it, for SGLang looks for a prefix when it takes a request
out of its queue. So the first of them goes ahead, and the others follow once it has its first token, when its keys and
values are in the prefix cache.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from math import nan
from typing import Any

from rlhf.rollout.sglang.wire import (
    Answers,
    Ask,
    Beat,
    Response,
    Times,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)

BEAT_S = 1.0
"""How often requests at work tell that the engine moves."""
ABORT_S = 0.05
"""How often SGLang is told to abort, for it knows nothing of requests that are still on their way to it."""
TOLD_TOKENS = 50
"""How often SGLang tells of a request that streams; it does so of others too, by its own default."""


class Requests:
    """Those of one leader rank. Everything here runs on the engine's event loop."""

    def __init__(self, tokenizer: Any, send: Callable[[Any], None]) -> None:
        self._tokenizer, self._send, self._clocks = tokenizer, send, Clocks(tokenizer)
        self._at_work: set[asyncio.Task[None]] = set()
        self._prompts: dict[bytes, _Prompt] = {}
        self._ended: list[Response] = []
        self._aborting = False
        self._beating: asyncio.Task[None] | None = None

    async def begin(self, asks: Sequence[Ask]) -> None:
        """More requests. Answers come as messages."""
        for ask in asks:
            self._at_work.add(task := asyncio.create_task(self._answer(ask)))
            task.add_done_callback(self._at_work.discard)
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())

    async def abort(self) -> None:
        """End all that is at work, with the tokens that there are."""
        self._aborting = True
        for prompt in self._prompts.values():
            prompt.is_cached.set()
        while self._at_work:
            self._tokenizer.abort_request(abort_all=True)
            await asyncio.wait(self._at_work, timeout=ABORT_S)
        self._aborting = False

    async def _answer(self, ask: Ask) -> None:
        received = time.monotonic()
        try:
            response = await self._sample(ask, received)
        except Exception as error:  # noqa: BLE001  the leader rank decides what becomes of it
            response = Response(ask.number, b"", b"", "", (), error=f"{type(error).__name__}: {error}")
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._tell)
        self._ended.append(response)

    async def _sample(self, ask: Ask, received: float) -> Response:
        if not ask.shares_prompt:
            return await self._generate(ask, received)
        prompt = self._prompts.get(ask.prompt)
        leads = prompt is None
        if prompt is None:
            prompt = self._prompts[ask.prompt] = _Prompt()
        prompt.num_users += 1
        try:
            if leads:
                return await self._generate(ask, received, prompt.is_cached.set)
            await prompt.is_cached.wait()
            if self._aborting:
                return Response(ask.number, b"", b"", "abort", (), times=Times(received, ended=time.monotonic()))
            return await self._generate(ask, received)
        finally:
            prompt.is_cached.set()
            prompt.num_users -= 1
            if not prompt.num_users:
                del self._prompts[ask.prompt]

    async def _generate(self, ask: Ask, received: float, has_first_token: Callable[[], None] | None = None) -> Response:
        from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

        meta: dict[str, Any] = {}
        asked = GenerateReqInput(
            input_ids=unpack_tokens(ask.prompt + ask.begun),
            sampling_params=ask.sampling | ({"stream_interval": TOLD_TOKENS} if has_first_token else {}),
            return_logprob=True,
            stream=has_first_token is not None,
        )
        async for answer in self._tokenizer.generate_request(asked, None):
            meta = answer["meta_info"]
            if has_first_token is not None:
                has_first_token()
        scored = meta.get("output_token_logprobs") or []  # none of what was aborted before it began
        return Response(
            number=ask.number,
            tokens=pack_tokens(token for _, token, _ in scored),
            logprobs=pack_logprobs(logprob for logprob, _, _ in scored),
            reason=meta["finish_reason"]["type"],
            versions=tuple(
                (span["version"], span["end"] - span["start"]) for span in meta.get("weight_versions") or []
            ),
            cached_tokens=meta.get("cached_tokens", 0),
            times=self._clocks.times_of(meta["id"], received),
        )

    def _tell(self) -> None:
        """All that ended in one round of the loop, in one message."""
        ended, self._ended = self._ended, []
        self._send(Answers(tuple(ended)))

    async def _beat(self) -> None:
        """While requests are at work and SGLang says something."""
        seen = None
        while self._at_work:
            await asyncio.wait(self._at_work, timeout=BEAT_S)
            if self._at_work and seen != (seen := self._tokenizer.last_receive_tstamp):
                self._send(Beat(sum(len(state.output_ids) for state in self._tokenizer.rid_to_state.values())))


class _Prompt:
    """A prompt that requests at work have."""

    def __init__(self) -> None:
        self.num_users = 0
        self.is_cached = asyncio.Event()


class Clocks:
    """When the scheduler began requests and they had their first tokens: SGLang looks once, at a first output."""

    def __init__(self, tokenizer: Any) -> None:
        self._seen: dict[str, tuple[float, float]] = {}
        self._look = tokenizer._get_scheduler_first_token_time
        tokenizer._get_scheduler_first_token_time = self._hear

    def times_of(self, name: str, received: float) -> Times:
        """Of a request that has just ended, by SGLang's name of it; they are forgotten."""
        begun, first_token = self._seen.pop(name, (nan, nan))
        return Times(received, begun, first_token, time.monotonic())

    def _hear(self, state: Any, output: Any, at: int) -> float | None:
        if output.time_stats is not None:
            told = output.time_stats[at]  # times are 0 before their time
            self._seen[output.rids[at]] = (told.forward_entry_time or nan, told.prefill_finished_time or nan)
        found: float | None = self._look(state, output, at)
        return found
