"""The leader rank's requests in the host, on a stand-in for SGLang's tokenizer manager."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from rlhf.rollout.sglang.inside.requests import Requests
from rlhf.rollout.sglang.wire import Answers, Ask, Response, pack_tokens, unpack_tokens
from tests.rollout.sglang.inside.gpu_standins import Recorder, recording_sglang

P, Q = (5, 6, 7), (8, 9)


class Manager:
    """SGLang's, which gives a request two tokens: each when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        """Prompts (and what was begun), in the order of coming."""
        self.gates: list[asyncio.Event] = []
        """Two a request: its first token, its end."""
        self.last_receive_tstamp, self.rid_to_state = 0.0, dict[str, Any]()
        self._aborted = asyncio.Event()

    def _get_scheduler_first_token_time(self, *_: Any) -> None:
        return None

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all
        self._aborted.set()

    async def generate_request(self, asked: Any, _: None) -> AsyncIterator[dict[str, Any]]:
        number, told = len(self.asked), asked.told
        self.asked.append(tuple(told["input_ids"]))
        gates = [asyncio.Event(), asyncio.Event()]
        self.gates += gates
        if told["input_ids"][0] == 99:
            await asyncio.sleep(0.01)  # others have come by then
            raise ValueError("as asked")
        for count, gate in enumerate(gates, start=1):
            waits = [asyncio.create_task(one.wait()) for one in (gate, self._aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()
            if not gate.is_set():
                yield self._meta(number, count - 1, "abort")
                return
            if count == 2 or told["stream"]:
                yield self._meta(number, count, "length")

    def _meta(self, number: int, count: int, reason: str) -> dict[str, Any]:
        return {
            "meta_info": {
                "id": f"{number}",
                "output_token_logprobs": [(-1.0, 40 + at, None) for at in range(count)],
                "finish_reason": {"type": reason},
                "weight_versions": [{"version": "4", "start": 0, "end": count}] if count else [],
            }
        }


def ask(number: int, prompt: tuple[int, ...], *, begun: tuple[int, ...] = (), shares: bool = True) -> Ask:
    return Ask(number, pack_tokens(prompt), pack_tokens(begun), {"max_new_tokens": 2}, shares)


Test = Callable[[Manager, Requests, Callable[[], dict[int, Response]]], Awaitable[None]]


def on_requests(test: Test) -> None:
    """Run a test on requests; `heard` are the responses so far, by number, each of which came once."""

    async def main() -> None:
        manager, said = Manager(), list[Any]()

        def heard() -> dict[int, Response]:
            found = [one for told in said if isinstance(told, Answers) for one in told.responses]
            assert len({one.number for one in found}) == len(found)
            return {one.number: one for one in found}

        await test(manager, Requests(manager, said.append), heard)

    with recording_sglang(Recorder()):
        asyncio.run(main())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_first_sample_of_a_prompt_goes_ahead_until_it_has_a_token_and_others_do_not_wait() -> None:
    async def test(manager: Manager, requests: Requests, heard: Callable[[], dict[int, Response]]) -> None:
        alone = [ask(number, Q, shares=False) for number in (2, 7)]
        await requests.begin([ask(0, P), ask(1, P), *alone, ask(3, P, begun=(1,))])
        await settle()
        assert manager.asked == [P, Q, Q]
        manager.gates[0].set()
        await settle()
        assert manager.asked == [P, Q, Q, P, (*P, 1)]
        await requests.begin([ask(4, P)])  # while some of the prompt are at work
        await settle()
        assert len(manager.asked) == 6
        for gate in manager.gates:
            gate.set()
        await settle()
        assert sorted(heard()) == [0, 1, 2, 3, 4, 7]
        assert all(unpack_tokens(one.tokens) == [40, 41] and one.versions == (("4", 2),) for one in heard().values())
        await requests.begin([ask(5, P), ask(6, P)])  # once all have ended, the first goes ahead again
        await settle()
        assert len(manager.asked) == 7
        for gate in manager.gates:
            gate.set()
        await settle()
        for gate in manager.gates:
            gate.set()
        await settle()
        assert sorted(heard()) == list(range(8))

    on_requests(test)


def test_an_abort_ends_those_that_run_and_those_that_wait_for_a_prompt_and_new_ones_may_come() -> None:
    async def test(manager: Manager, requests: Requests, heard: Callable[[], dict[int, Response]]) -> None:
        await requests.begin([ask(0, P), ask(1, P), ask(2, Q, shares=False)])
        await settle()
        manager.gates[2].set()  # a token of the one that runs alone
        await settle()
        await asyncio.wait_for(requests.abort(), timeout=10)
        await settle()
        assert manager.asked == [P, Q]
        assert {number: (one.reason, unpack_tokens(one.tokens)) for number, one in heard().items()} == {
            0: ("abort", []),
            1: ("abort", []),
            2: ("abort", [40]),
        }
        manager._aborted.clear()
        await requests.begin([ask(3, P), ask(4, P)])
        await settle()
        manager.gates[4].set()
        await settle()
        assert manager.asked[2:] == [P, P]
        for gate in manager.gates:
            gate.set()
        await settle()
        assert (heard()[3].reason, heard()[4].reason) == ("length", "length")

    on_requests(test)


def test_what_sglang_refuses_is_told_and_those_that_waited_for_it_are_asked() -> None:
    async def test(manager: Manager, requests: Requests, heard: Callable[[], dict[int, Response]]) -> None:
        await requests.begin([ask(0, (99,)), ask(1, (99,)), ask(2, Q)])
        await settle()
        assert manager.asked == [(99,), Q]
        for gate in manager.gates:
            gate.set()
        await asyncio.sleep(0.1)
        assert {number: one.error for number, one in heard().items()} == {
            0: "ValueError: as asked",
            1: "ValueError: as asked",
            2: "",
        }

    on_requests(test)


def test_a_response_has_the_times_that_its_scheduler_tells() -> None:
    async def test(manager: Manager, requests: Requests, heard: Callable[[], dict[int, Response]]) -> None:
        told = SimpleNamespace(forward_entry_time=11.0, prefill_finished_time=0.0)
        await requests.begin([ask(0, P, shares=False)])
        await settle()
        manager._get_scheduler_first_token_time(None, SimpleNamespace(time_stats=[told], rids=["0"]), 0)
        for gate in manager.gates:
            gate.set()
        await settle()
        times = heard()[0].times
        assert times.begun == 11.0
        assert times.first_token != times.first_token  # 0: before its time
        assert times.received <= times.ended

    on_requests(test)
