"""A rank's door to its scheduler: windows of weights go through regions that both see, errors and sums come back."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.errors import EngineError, EngineLostError, WeightSyncError
from rlhf.families.spec import ModelSpec
from rlhf.reshard.checksum import Place
from rlhf.reshard.transport import torch_dtype
from rlhf.reshard.windows import NUM_REGIONS, Manifest
from rlhf.rollout.sglang.layout import Sizes, check_table, padding_elements
from rlhf.rollout.sglang.life.board import stat_of
from rlhf.rollout.sglang.life.patience import Patience
from rlhf.rollout.sglang.life.watch import Watched
from rlhf.rollout.sglang.weights.channel import Channel, Door
from rlhf.rollout.sglang.weights.loader import ServeTransfer
from rlhf.rollout.sglang.weights.manifest import write_manifest
from rlhf.rollout.sglang.weights.regions import Regions, make_regions


class UpdatePort(Protocol):
    """What the leader asks of the engine's host process around a transfer."""

    def begin_update(self) -> None:
        """Stop sampling and open a weight update."""

    def load_window(self, errands: Sequence[ServeTransfer]) -> None:
        """Run one errand on each scheduler, by tp rank; returns when all have ended."""


class SchedulerSink:
    """The `WindowSink` of one rank of an SGLang engine. Made and used by all ranks of the engine in step.

    The leader (tp rank 0) has the port to the host; every rank has a channel to the scheduler of its own tp rank, so
    that windows pass without the host, at each rank's own pace.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sizes: Sizes,
        *,
        tp_rank: int,
        dtype: str,
        port: UpdatePort | None,
        cpu_group: ProcessGroup | None,
        device: torch.device,
        limit_s: float = 60.0,
        reply_limit_s: float = math.inf,
        others: Sequence["SchedulerSink"] = (),
    ) -> None:
        """Collective over `cpu_group` (None: an engine of one rank). `port`: on the leader alone.

        Where one process speaks for all tp ranks, it makes the sinks of the others first, and gives them to the
        leader's; that one is then opened first and closed last.

        `device` is where the transport of the sync works; `limit_s` is how long a scheduler may take to call back,
        `reply_limit_s` to answer; one that takes longer counts as hung.
        """
        self._spec, self._sizes, self._dtype = spec, sizes, dtype
        self._port, self._device, self._limit_s, self._reply_limit_s = port, device, limit_s, reply_limit_s
        self._tp_rank = tp_rank
        self._door = Door()
        self._doors = [self._door.name, *(one._door.name for one in others)]
        if cpu_group is not None:
            found: list[Any] = [None] * dist.get_world_size(cpu_group)
            dist.all_gather_object(found, self._door.name, group=cpu_group)
            self._doors = found
        self._peer = f"the scheduler of tp rank {self._tp_rank}"
        self._channel: Channel | None = None
        self._serving: threading.Thread | None = None
        self._failure: EngineError | None = None
        self._regions: Regions | None = None
        self._known: dict[int, Manifest] = {}
        self._unanswered, self._num_loaded = 0, 0
        self._is_anew, self._completes = False, False
        self.is_lost = False
        """See `WindowSink.is_lost`: this one raises instead; `LastingSink` does not."""
        self.needs_complete = True
        """The engine does not hold the weights of an earlier transfer: the next one must bring all."""
        self._watched: Watched | None = None

    def check_model(self) -> None:
        """Compare the layout with the names, shapes and dtypes of the scheduler's model. All ranks of the engine call.

        Raises:
            LayoutError: The first difference.
        """
        check_models([self])

    def forget(self) -> None:
        """The engine's weights were released or are lost; all ranks of the engine call."""
        self.needs_complete = self._is_anew = True

    def begin(self, manifest: Manifest, dtype: str) -> None:
        """See `WindowSink.begin`."""
        needs_complete, self.needs_complete = self.needs_complete, True  # until all went well
        self._num_loaded = 0
        self._open()
        self._make_room(manifest.region_elements, dtype)
        told: dict[str, Any] = {"do": "begin", "id": str(id(manifest)), "anew": needs_complete and self._is_anew}
        if id(manifest) not in self._known:
            padding = padding_elements(self._spec, self._sizes, self._tp_rank)
            told["manifest"] = write_manifest(manifest, dtype=dtype, padding=padding)
        self._ask(told)
        self._known[id(manifest)] = manifest  # kept, so that its id stays its own
        self._is_anew = False
        self._completes = manifest.complete or not needs_complete

    def region(self, number: int) -> Tensor:
        """See `WindowSink.region`."""
        assert self._regions is not None, "begin comes first"
        while self._num_loaded <= number - NUM_REGIONS:
            self._take()
            self._num_loaded += 1
        return self._regions.tensors[number % NUM_REGIONS]

    def hand_over(self, number: int) -> None:
        """See `WindowSink.hand_over`."""
        assert self._regions is not None, "begin comes first"
        self._regions.settle()
        self._tell({"do": "window", "number": number})

    def finish(self) -> None:
        """See `WindowSink.finish`."""
        while self._unanswered:
            self._take()
        self._ask({"do": "finish"})
        self.needs_complete = not self._completes

    def sums(self, places: Sequence[Place], *, brief: bool) -> Sequence[int]:
        """See `WindowSink.sums`."""
        asked = [[tensor, box.spans] for tensor, box in places]
        found: list[int] = self._ask({"do": "sums", "places": asked, "brief": brief})["sums"]
        return found

    def end(self) -> None:
        """See `WindowSink.end`."""
        if self._channel is None:
            return
        while self._unanswered:  # of a transfer that was broken off
            self._channel.receive(self._patience())
            self._unanswered -= 1
        self._channel.send({"do": "end"})
        if self._serving is not None:
            self._serving.join()
            self._serving = None
            self._raise_failure()

    def give_up(self) -> EngineError | None:
        """The engine is lost, and nothing more is wanted of it: this rank's scheduler is ended, so that nobody waits.

        Nothing but `close` may be called afterwards.

        Returns:
            What the engine's host has to say of a scheduler that was gone, on the leader; it knows how that ended.
        """
        was_found_here = self._failure is not None  # and what ends below ends on its account
        if self._watched is not None:
            self._watched.end()
        if self._channel is not None:
            self._channel.close()
        if self._serving is not None:  # the host answers, or is lost too
            self._serving.join()
            self._serving = None
        return None if was_found_here else self._failure

    def close(self) -> None:
        """Nothing but `close` may be called afterwards."""
        self._door.close()
        if self._channel is not None:
            self._channel.close()

    def _open(self) -> None:
        """The schedulers serve their ranks until `end`."""
        if self._port is not None:
            self._port.begin_update()
            self._failure = None
            self._serving = threading.Thread(target=self._serve, args=(self._port,), name="rlhf-load", daemon=True)
            self._serving.start()
        if self._channel is None:
            self._channel = self._door.open(peer=self._peer, limit_s=self._limit_s, while_waiting=self._raise_failure)
            pid = self._channel.pid
            self._watched = Watched(f"{self._peer} (pid {pid})", pid, stat_of(pid)[1])

    def _serve(self, port: UpdatePort) -> None:
        try:
            port.load_window([ServeTransfer(door) for door in self._doors])
        except EngineError as error:
            self._failure = error

    def _patience(self) -> Callable[[], None]:
        """What to do while waiting for one answer: raise EngineLostError when there will be none."""
        patience, watched = Patience(self._reply_limit_s), self._watched

        def look() -> None:
            fault = watched.fault(0) if watched is not None else ""  # whoever is asked has something to do
            if self._failure is None and fault:
                self._failure = EngineLostError(f"weight update: {fault}; needs a living engine; see its log")
            if self._failure is None and patience.is_over():
                self._failure = EngineLostError(
                    f"weight update: {self._peer} has not answered for {self._reply_limit_s:g} s, so it hangs or waits "
                    "for one that does; see the log of its engine; more time: rollout.sglang.reply_limit_s"
                )
            self._raise_failure()

        return look

    def spare(self, elements: int, dtype: str) -> tuple[Tensor, ...]:
        """Memory for windows that nobody will load."""
        return tuple(torch.empty(elements, dtype=torch_dtype(dtype), device=self._device) for _ in range(NUM_REGIONS))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _make_room(self, elements: int, dtype: str) -> None:
        if self._regions is not None and self._regions.tensors[0].numel() >= elements:
            return
        self._regions = None  # freed before its successor is there
        self._regions = make_regions(elements, dtype, self._device)
        fd = self._regions.fd
        self._tell({"do": "regions", "regions": self._regions.told(), "has_fd": fd is not None}, fd=fd)
        self._take()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._tell(message)
        return self._take()

    def _tell(self, message: dict[str, Any], *, fd: int | None = None) -> None:
        assert self._channel is not None, "begin comes first"
        self._channel.send(message)
        if fd is not None:
            self._channel.send_fd(fd)
        self._unanswered += 1

    def _take(self) -> dict[str, Any]:
        """The answer to the oldest question.

        Raises:
            WeightSyncError: It is a refusal.
        """
        assert self._channel is not None, "begin comes first"
        answer = self._channel.receive(self._patience())
        self._unanswered -= 1
        if "error" in answer:
            raise WeightSyncError(f"{self._peer}: {answer['error']}")
        return answer

    def _compare_model(self) -> None:
        table = self._ask({"do": "describe"})["table"]
        found = {name: (tuple(shape), dtype) for name, (shape, dtype) in table.items()}
        check_table(self._spec, self._sizes, self._dtype, found, where=f"rollout.sglang, tp rank {self._tp_rank}")


def check_models(sinks: Sequence[SchedulerSink]) -> None:
    """`SchedulerSink.check_model` of the sinks that one process has of an engine, the leader's first."""
    try:
        for sink in sinks:
            sink._open()
        for sink in sinks:
            sink._compare_model()
    finally:
        for sink in reversed(sinks):
            sink.end()
