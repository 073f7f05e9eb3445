"""SIGTERM and SIGUSR1, handled by a thread, so that a rank that sits in a collective hears them too."""

import os
import signal
import threading
from collections.abc import Callable, Mapping


class SignalThread:
    """Calls a function for each of some signals, from a thread of its own. Made on the main thread.

    Python runs its handlers between byte codes of the main thread, which may be inside a collective for minutes; the
    C part of a handler writes the signal's number to the wake-up descriptor at once, and the thread reads it there.
    """

    def __init__(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        self._actions = dict(actions)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, lambda *_: None) for number in self._actions}
        self._thread = threading.Thread(target=self._run, name="rlhf-signals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (number := os.read(self._read, 1)[0]) != 0:
            action = self._actions.get(number)  # type: ignore[call-overload]  # Signals is an int
            if action is not None:
                action()

    def close(self) -> None:
        """Put the old handlers back and end the thread."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)
