"""The host process of an SGLang engine: starts it, does what the leader rank asks, dies with the leader rank.

SGLang's signal handlers, globals and process tree live here and stay out of the trainer. It is a fresh interpreter,
which may belong to another environment than the job's; see `rlhf/rollout/sglang/life/process.py` for the other end.
"""

import asyncio
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rlhf.rollout.sglang.cpu import install_cpu_shim
from rlhf.rollout.sglang.inside.entries import LOADER, RPC, Entry, packed_errand, run_scheduler
from rlhf.rollout.sglang.inside.requests import Requests
from rlhf.rollout.sglang.life.board import HOST, Pulse, after_the_dead, watch_children
from rlhf.rollout.sglang.life.parent import die_with_parent
from rlhf.rollout.sglang.memory import GiveBack, TakeAgain
from rlhf.rollout.sglang.multi_host.company import follow, lead, serve_member
from rlhf.rollout.sglang.wire import (
    Errand,
    Order,
    Outcome,
    Reply,
    Request,
    SchedulerErrand,
    take_outcomes,
)

SETTLE_S = 5.0
"""How long schedulers may take to be idle once they have answered everything."""
PLAIN_BACKENDS = ("triton", "auto", "torch_native")
"""Backends of experts that take the weights as the model has them; anything else SGLang may have chosen is refused."""


def main(fd: int) -> None:
    """Serve the leader rank at the other end of a socket until it closes it."""
    channel = Connection(fd)
    order: Order = channel.recv()
    die_with_parent(order.parent)
    pulse = Pulse(HOST)
    watch_children()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
    line, party = None, order.party
    try:
        if party is not None and party.node:
            line = follow(party)
        elif party is not None:
            lead(party)
        engine = start_engine(order)
        check_resolved(engine)
    except BaseException as error:  # noqa: BLE001  SystemExit of an argument parser too: all of it is told
        traceback.print_exc()
        channel.send(Reply(0, error=f"{type(error).__name__}: {error}"))
        os._exit(1)
    if line is not None:
        serve_member(channel, line)
    # What was imported is no garbage; on CPUs SGLang looks through it at each flush of its cache, for 0.3 s.
    engine.loop.run_until_complete(engine.tokenizer_manager.freeze_gc())
    host = Host(engine, channel, tp_size=order.server_args["tp_size"], cpu=order.cpu)
    channel.send(Reply(0))
    engine.loop.run_until_complete(host.serve(pulse))


def start_engine(order: Order) -> Any:
    """SGLang's engine, whose children begin in `rlhf/rollout/sglang/inside/entries.py`."""
    if order.cpu:
        install_cpu_shim()
    from sglang.srt.entrypoints import engine  # noqa: PLC0415
    from sglang.srt.managers import tokenizer_manager  # noqa: PLC0415

    for module in (engine, tokenizer_manager):  # while it starts, and after
        module.kill_process_tree = after_the_dead(module.kill_process_tree)

    class HostedEngine(engine.Engine):  # type: ignore[misc]  # without annotations
        run_scheduler_process_func = Entry(partial(run_scheduler, order.by_seed, order.decode), order.cpu, os.getpid())

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            """None: it has no tokenizer, and schedulers answer the host themselves. Nothing would ever reach it."""
            return [], []

    return HostedEngine(**order.server_args)


def check_resolved(engine: Any) -> None:
    """Refuse what SGLang chose by itself where it would lay out weights in another way than a sync writes them."""
    from sglang.srt.runtime_context import get_exec, get_model  # noqa: PLC0415
    from sglang.srt.utils import cpu_has_amx_support  # noqa: PLC0415

    backend = str(get_exec().moe.moe_runner_backend)
    found = {
        "quantization": get_model().quantization or "",
        "moe_runner_backend": "" if backend in PLAIN_BACKENDS else backend,
        "AMX": "on" if cpu_has_amx_support() else "",
    }
    if unsafe := {name: value for name, value in found.items() if value}:
        raise ValueError(f"SGLang chose {unsafe}, which repacks weights; choose others by rollout.sglang.extra_args")


class Host:
    """The engine and what may be asked of it. One event loop; requests may overlap."""

    def __init__(self, engine: Any, channel: Connection, *, tp_size: int, cpu: bool) -> None:
        self._engine, self._tokenizer = engine, engine.tokenizer_manager
        self._channel, self._tp_size, self._cpu = channel, tp_size, cpu
        self._updating = False
        self._requests = Requests(engine.tokenizer_manager, channel.send)
        self._verbs: dict[str, Callable[..., Awaitable[Any]]] = {
            "sample": self._requests.begin,
            "abort": self._requests.abort,
            "begin_update": self._begin_update,
            "load_window": self._load_window,
            "end_update": self._end_update,
            "ask_schedulers": self._ask_schedulers,
            "pause": self._pause,
            "resume": self._resume,
            "flush": self._flush,
            "release_memory": self._release_memory,
            "retake_memory": self._retake_memory,
        }

    async def serve(self, pulse: Pulse) -> None:
        """Until the leader rank closes the socket or dies."""
        inbox: asyncio.Queue[Request | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop, inbox), name="rlhf-requests", daemon=True).start()
        tasks: set[asyncio.Task[None]] = {asyncio.create_task(pulse.keep_beating())}
        while (request := await inbox.get()) is not None:
            tasks.add(task := asyncio.create_task(self._answer(request)))
            task.add_done_callback(tasks.discard)

    def _read(self, loop: asyncio.AbstractEventLoop, inbox: "asyncio.Queue[Request | None]") -> None:
        """A thread: the engine's event loop may be busy, and a closed socket must be seen all the same."""
        while True:
            try:
                request = self._channel.recv()
            except (EOFError, OSError):
                os._exit(0)  # the kernel ends the children
            loop.call_soon_threadsafe(inbox.put_nowait, request)

    async def _answer(self, request: Request) -> None:
        try:
            reply = Reply(request.number, await self._verbs[request.verb](*request.arguments))
        except Exception as error:  # noqa: BLE001  the leader rank decides what becomes of it
            traceback.print_exc()
            reply = Reply(request.number, error=f"{type(error).__name__}: {error}")
        if request.number or reply.error:  # the others are answered by messages of their own
            self._channel.send(reply)

    # Sampling

    async def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput  # noqa: PLC0415

        await self._tokenizer.pause_generation(PauseGenerationReqInput(mode=mode))

    async def _resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput  # noqa: PLC0415

        await self._tokenizer.continue_generation(ContinueGenerationReqInput())

    async def _flush(self) -> None:
        """Forget keys and values. A scheduler is idle only a step after its last answer, so it gets a moment."""
        flushed = await self._tokenizer.flush_cache(timeout_s=SETTLE_S)
        if not flushed.success:
            raise RuntimeError(f"SGLang did not flush its cache: {flushed.message or 'requests are running'}")

    # Weights

    async def _begin_update(self) -> None:
        """Nothing is sampled until the end; what runs is put back and its cache made anew by the new weights.

        An update that failed is still open, and the next one goes on in it.
        """
        if self._updating:
            return
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput  # noqa: PLC0415

        self._updating = True
        await self._pause("retract")
        _demand(await self._tokenizer.begin_weight_update(BeginWeightUpdateReqInput(selector="target"), None))

    async def _load_window(self, errands: Sequence[Errand]) -> list[Any]:
        """Run one errand on each scheduler, inside the update that is open; their values by tp rank."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput  # noqa: PLC0415

        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[packed_errand(errand) for errand in errands],
            load_format=LOADER,
            flush_cache=False,  # once, at the end
            selector="target",
        )
        said = await self._tokenizer.update_weights_from_tensor(asked, None)
        return _values(take_outcomes(self._tp_size), said)

    async def _end_update(self, version: str) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput, UpdateWeightVersionReqInput  # noqa: PLC0415

        if self._updating:
            _demand(await self._tokenizer.end_weight_update(EndWeightUpdateReqInput(), None))
            await self._flush()
        await self._tokenizer.update_weight_version(UpdateWeightVersionReqInput(new_version=version))
        if self._updating:
            await self._resume()
        self._updating = False

    async def _ask_schedulers(self, errand: Errand | SchedulerErrand) -> list[Any]:
        """Run one errand on every scheduler, outside of an update; their values by tp rank."""
        call = partial(self._engine.collective_rpc, RPC, payload=pickle.dumps(errand).hex())
        await asyncio.get_running_loop().run_in_executor(None, call)  # the loop must hear of a scheduler that dies
        return _values(take_outcomes(self._tp_size), (True, ""))

    # Memory

    async def _release_memory(self, tags: tuple[str, ...]) -> None:
        """Keys and values are forgotten; refused while requests are at work, which SGLang's schedulers would die of."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput  # noqa: PLC0415

        await self._flush()
        if self._cpu:
            await self._ask_schedulers(GiveBack(tags))
        else:
            await self._tokenizer.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)), None)

    async def _retake_memory(self, tags: tuple[str, ...]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput  # noqa: PLC0415

        if self._cpu:
            await self._ask_schedulers(TakeAgain(tags))
        else:
            await self._tokenizer.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)), None)


def _demand(said: tuple[bool, str]) -> None:
    """SGLang answers updates by a flag and a text."""
    if not said[0]:
        raise RuntimeError(f"SGLang: {said[1]}")


def _values(outcomes: list[Outcome], said: tuple[bool, str]) -> list[Any]:
    if failed := [f"tp rank {rank}: {one.error}" for rank, one in enumerate(outcomes) if one.error]:
        raise RuntimeError("; ".join(failed))
    _demand(said)
    return [one.value for one in outcomes]
