"""The reward process: loads one function and calls it on what comes down the socket. Imports no torch.

It ends itself when its rank is gone: an idle one reads the end of the socket, a busy one is ended by faulthandler's
watchdog, a C thread that needs no interpreter lock and so fires in the middle of a regular expression too.
"""

import faulthandler
import importlib
import importlib.util
import math
import numbers
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rlhf.data.record import PromptRecord, RewardResult
from rlhf.reward.wire import Inbox, packed

LARGEST_SCORE = 3.4e38
"""Scores become float32."""
MAX_PRINTED = 64 * 1024
"""Characters that one call may print; what follows is dropped."""

Outcome = tuple[float, tuple[tuple[str, float], ...], str]
"""Score, parts, error: a RewardResult without its class."""


def main(fd: int, function: str, timeout_s: float, trace_fd: int) -> None:
    """Serve until the socket ends. Says ("ready",) or ("failed", why), then one Outcome for each call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
    channel, inbox = socket.socket(fileno=fd), Inbox()
    sys.stdout, sys.stderr = (CappedOutput(stream) for stream in (sys.stdout, sys.stderr))
    try:
        call = load_function(function)
    except BaseException as error:  # noqa: BLE001  the user's module may raise anything, SystemExit too
        channel.sendall(packed(("failed", f"{type(error).__name__}: {error}")))
        return
    channel.sendall(packed(("ready",)))
    while data := channel.recv(1 << 16):
        inbox.feed(data)
        try:
            message = inbox.take()
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            channel.sendall(packed(failure(error)))
            continue
        if message is not None:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=trace_fd)
            outcome = guarded(call, message)
            faulthandler.cancel_dump_traceback_later()
            channel.sendall(packed(outcome))


class CappedOutput:
    """A text stream that swallows what one call prints beyond MAX_PRINTED, so that no disk or pipe fills up."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.left = stream, MAX_PRINTED

    def write(self, text: str) -> int:
        """Print what still fits."""
        if self.left > 0:
            self.stream.write(text[: self.left])
        self.left -= len(text)
        return len(text)

    def renew(self) -> None:
        """A call has ended: let the next one print."""
        self.left = MAX_PRINTED
        self.stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def load_function(location: str) -> Callable[..., object]:
    """What `package.module:function` or `path/to/file.py:function` names.

    Raises:
        ImportError: There is no such module or file.
        AttributeError: It has no such function.
        TypeError: The name is not callable.
        Exception: Whatever the module raises while it is imported.
    """
    place, _, name = location.rpartition(":")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ImportError(f"no file {place}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, f"{path} ends with .py"
        assert spec.loader is not None, f"{path} ends with .py"
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickle look their module up
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function


def guarded(call: Callable[..., object], message: tuple[Any, ...]) -> Outcome:
    """One call, whatever it raises or returns."""
    text, answer, entry, response = message
    try:
        return checked(call(PromptRecord(text, answer, entry), response))
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are failures of the row too
        return failure(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, CappedOutput):
                stream.renew()


def failure(error: BaseException) -> Outcome:
    """What went wrong, with the innermost place in the user's code."""
    at, place = error.__traceback__, ""
    while at is not None:
        place, at = f" at {Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}", at.tb_next
    return 0.0, (), f"raised {type(error).__name__}: {error!s:.300}{place}"


def checked(value: object) -> Outcome:
    """A returned value as score and parts, or the reason why it is none."""
    score, parts = value, tuple[tuple[str, float], ...]()
    if isinstance(value, RewardResult):
        if value.error:
            return 0.0, (), str(value.error)
        score, parts = value.score, tuple(value.parts)
    numbered: list[float] = []
    for name, number in (("score", score), *parts):
        if not isinstance(number, numbers.Real):
            return 0.0, (), f"{name} is a {type(number).__name__} ({number!r:.60}); needs a number or a RewardResult"
        if not math.isfinite(number) or abs(float(number)) > LARGEST_SCORE:
            return 0.0, (), f"{name} is {float(number)}; needs a finite float32 number"
        numbered.append(float(number))
    return numbered[0], tuple((str(name), part) for (name, _), part in zip(parts, numbered[1:], strict=True)), ""
