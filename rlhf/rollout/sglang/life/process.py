"""An engine's host process as its leader rank sees it: started, asked, watched, ended."""

import contextlib
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rlhf
from rlhf.dist.ending import end_tree
from rlhf.errors import EngineError, EngineLostError
from rlhf.rollout.sglang.life.patience import Patience
from rlhf.rollout.sglang.life.watch import STOPPED_LOOKS, EngineWatch, how_ended
from rlhf.rollout.sglang.wire import Errand, Order, Reply, Request

SLICE_S = 0.5
"""How long the leader rank waits at a time before it looks at the clock and at the engine's processes."""
DYING_S = 2.0
"""How long after its last word a process may take to be gone."""
TAIL_LINES = 20

HOST = "rlhf.rollout.sglang.inside.host:main"
CHILD = (
    "import importlib, json, sys; path, fd, module, name = json.loads(sys.argv[1]); "
    "sys.path[:] = path[0] or sys.path + path[1]; "
    "getattr(importlib.import_module(module), name)(fd)"
)
OURS = str(Path(rlhf.__file__).parents[1])
"""Where this package lies; last among the places of an interpreter of another environment, whose own go first."""


class HostProcess:
    """A fresh interpreter (never a fork) with one SGLang engine in it, in a session and process group of its own.

    Made on the main thread: the kernel ends the host when the thread that began it ends.
    """

    def __init__(
        self,
        order: Order,
        *,
        python: str,
        environment: dict[str, str],
        folder: Path,
        log_path: Path,
        start_limit_s: float,
        reply_limit_s: float,
        on_wait: Callable[[], None] = lambda: None,
        entry: str = HOST,
        open_files: Sequence[int] = (),
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            order: What it is to start.
            python: Interpreter, with the packages of its own environment and this one; empty is the job's.
            environment: Of the process, whole but for the place of its temporary files.
            folder: For these, and for word of its processes; the engine's own.
            log_path: What it and SGLang print; appended to.
            start_limit_s: It must be ready by then.
            reply_limit_s: A request without a sign of life for this long counts as hung.
            on_wait: Called again and again while it starts.
            entry: `module:function` that the process runs, with its end of the socket.
            open_files: Descriptors that it gets, under the same numbers.

        Raises:
            EngineError: It could not start.
            EngineLostError: It was not ready in time, or one of its processes died or was stopped meanwhile.
        """
        self._watch = EngineWatch(folder)
        self._name, self._log_path, self._limit_s = log_path.stem, log_path, reply_limit_s
        self._number, self._looked = 0, 0.0
        self._silence = Patience(reply_limit_s)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        path = ([], [OURS]) if python else (sys.path, [])
        ours, theirs = socket.socketpair()
        with theirs, log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [python or sys.executable, "-c", CHILD, json.dumps([path, theirs.fileno(), *entry.split(":")])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), *open_files),
                start_new_session=True,
                env=environment | {"TMPDIR": str(folder)},
            )
        self._channel: Connection | None = Connection(ours.detach())
        self._channel.send(order)
        try:
            self._await(0, start_limit_s, on_wait=on_wait, should_move=False)
        except BaseException:
            self.close()
            raise

    def call(self, verb: str, *arguments: Any, patient: bool = False) -> Any:
        """Ask for something and wait for it; `patient`: as long as its processes live, even if none moves.

        Raises:
            EngineError: The host says that it failed.
            EngineLostError: It or a process of SGLang's died, was stopped, or hangs. All of them are ended then.
        """
        if self._channel is None:
            raise self._closed()
        self._number += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is read below
            self._channel.send(Request(self._number, verb, arguments))
        limit_s = math.inf if patient else self._limit_s
        return self._await(self._number, limit_s, on_wait=None, should_move=not patient, verb=verb)

    def tell(self, verb: str, *arguments: Any) -> None:
        """Ask for something that is answered by messages, if at all; `hear` them."""
        if self._channel is None:
            raise self._closed()
        self._silence.begin_anew()  # it has so long from now on
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `hear` reads its end
            self._channel.send(Request(0, verb, arguments))

    def hear(self, wait_s: float, *, verb: str) -> list[Any]:
        """Messages that have come; waits so long for a first one. `verb`: what the host should be at, "" for nothing.

        Raises:
            EngineLostError: As `call`.
        """
        if self._channel is None:
            raise self._closed()
        told = list[Any]()
        try:
            while self._channel.poll(0.0 if told else wait_s):
                told.append(self._channel.recv())
        except (EOFError, ConnectionResetError):
            raise self._lost("", verb) from None
        if told or not verb:
            self._silence.begin_anew()
        elif self._silence.is_over():
            raise self._lost(f"its host process has said nothing for {self._limit_s:g} s", verb)
        if (now := time.monotonic()) > self._looked + SLICE_S:
            self._looked = now
            self._look(verb, should_move=True)
        return told

    def close(self) -> None:
        """End the host and all that it started, and nothing else. Idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process.returncode is None:  # else its pid may be another's by now
            end_tree(self._process.pid)
            self._process.wait()
        for pid in self._watch.living():  # of a host that has died before them
            end_tree(pid)

    def witness(self) -> str:
        """Which of its processes has ended or stopped, and how, when it is known that the engine is lost; "": none.

        Waits a moment for one to end.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=DYING_S)
        code = self._process.poll()
        own = "" if code is None else f"host (pid {self.pid}) {how_ended(code)}"
        looks = [self._watch.fault(should_move=False) for _ in range(STOPPED_LOOKS)]
        return self._watch.first_end() or own or looks[-1]

    @property
    def is_open(self) -> bool:
        """Whether it can be asked for anything."""
        return self._channel is not None

    @property
    def pid(self) -> int:
        """Of the host."""
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Of all processes of the engine that have entered themselves and live."""
        return self._watch.living()

    def _await(
        self,
        number: int,
        limit_s: float,
        *,
        on_wait: Callable[[], None] | None,
        should_move: bool,
        verb: str = "start",
    ) -> Any:
        """The value of a request. `should_move`: see `EngineWatch.fault`."""
        assert self._channel is not None, "asked above"
        silence = Patience(limit_s)
        while True:
            try:
                told = self._channel.recv() if self._channel.poll(SLICE_S) else None
            except (EOFError, ConnectionResetError):
                raise self._lost("", verb) from None
            if told is None:
                self._look(verb, should_move=should_move)
                if silence.is_over():
                    raise self._lost(f"its host process has said nothing for {limit_s:g} s", verb)
                if on_wait is not None:
                    on_wait()
            if isinstance(told, Reply) and told.number == number:
                if told.error:
                    raise self._failed(told.error, verb)
                return told.value

    def _look(self, verb: str, *, should_move: bool) -> None:
        if fault := self._watch.fault(should_move=should_move):
            raise self._lost(fault, verb or "rest")

    def _closed(self) -> EngineLostError:
        return EngineLostError(f"{self._name}: its processes have ended; needs a new start; call restart()")

    def _failed(self, text: str, verb: str) -> EngineError:
        """What the host says went wrong, unless a process of the engine has ended, which says more."""
        if ended := self._watch.first_end():
            return self._lost(ended, verb)
        return EngineError(f"{self._name}: {verb}: {text}\nThe end of {self._log_path}:\n{self._tail()}")

    def _lost(self, fault: str, verb: str) -> EngineLostError:
        """The error that names the process at fault ("": find out); all of the engine's are gone afterwards."""
        if not fault or fault.endswith("died"):  # the host may be at its end because another process is
            dying = Patience(DYING_S)
            while (code := self._process.poll()) is None and not self._watch.first_end() and not dying.is_over():
                time.sleep(0.02)
            own = "" if code is None else f"host (pid {self.pid}) {how_ended(code)}"
            fault = self._watch.first_end() or own or fault or f"host (pid {self.pid}) closed its end"
        self.close()
        return EngineLostError(
            f"{self._name}: {fault} while it was at {verb}; all of its processes were ended; needs a living engine; "
            f"see {self._log_path}, whose end is:\n{self._tail()}"
        )

    def _tail(self) -> str:
        with self._log_path.open("rb") as file:
            file.seek(max(0, self._log_path.stat().st_size - 20000))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])


class HostPort:
    """What the sink of an engine's leader rank asks of the host around a transfer of weights."""

    def __init__(self, host: HostProcess) -> None:
        self._host = host
        self.is_updating = False
        """From `begin_update` until the engine ends the update."""

    def begin_update(self) -> None:
        """Nothing is sampled until the engine's `weights_updated`; an update that is open goes on."""
        self.is_updating = True
        self._host.call("begin_update")

    def load_window(self, errands: Sequence[Errand]) -> None:
        """Run one errand on each scheduler, by tp rank, inside the open update; returns when all have ended.

        As long as it takes: whoever talks to the errands sees whether they move.
        """
        self._host.call("load_window", errands, patient=True)
