"""What of ours runs inside SGLang's own processes: their entry points, and errands on a scheduler's model.

SGLang's engine spawns its children through `Entry`, so that the shim for CPUs is in place before SGLang is.
"""

import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.rollout.sglang.cpu import install_cpu_shim
from rlhf.rollout.sglang.inside.sampling import draw_by_seed, end_before_abort, stop_by_strings
from rlhf.rollout.sglang.life.board import Pulse, write_raised
from rlhf.rollout.sglang.life.parent import die_with_parent
from rlhf.rollout.sglang.multi_host.meeting import meet_by_token
from rlhf.rollout.sglang.multi_host.seals import seal_pickles
from rlhf.rollout.sglang.wire import Errand, Outcome, SchedulerErrand, write_outcome

LOADER = "rlhf.rollout.sglang.inside.entries.load_errand"
"""The weight loader of ours, as SGLang's server argument `custom_weight_loader` and its `load_format` name it."""
ERRAND = "errand"
"""Name of the one tensor that carries an errand past SGLang's own unpickler, which admits no class of ours."""
RPC = "rlhf_errand"
"""Method that our entry point gives SGLang's scheduler, for `collective_rpc`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a process of SGLang's runs; where it is unpickled, before SGLang is imported, it prepares the process.

    Multiprocessing unpickles the function of a new process before its arguments, which are SGLang's.
    """

    run: Callable[..., None]
    cpu: bool
    parent: int
    """Process id of the host; the process dies with it."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run it with SGLang's arguments."""
        self.run(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _entered, (self.run, self.cpu, self.parent)


def _entered(run: Callable[..., None], cpu: bool, parent: int) -> Entry:
    die_with_parent(parent)
    if cpu:
        install_cpu_shim()
    return Entry(run, cpu, parent)


def run_scheduler(by_seed: bool, decode: bytes, *args: Any, **kwargs: Any) -> None:
    """A scheduler process; `by_seed` and `decode` are those of `Order`, the fourth of SGLang's is its tp rank."""
    pulse = Pulse(f"scheduler tp {args[3]}")
    meet_by_token(seal_pickles)
    from sglang.srt.managers import scheduler  # noqa: PLC0415

    setattr(scheduler.Scheduler, RPC, _run_by_rpc)
    _tell_times()
    # Its load, for routers: a file in /dev/shm that a killed process would leave behind.
    scheduler.create_load_snapshot_writer = lambda *_, **__: None
    end_before_abort()
    if by_seed:
        draw_by_seed()
    if decode:
        stop_by_strings(decode)
    _beat_at(scheduler.Scheduler, "ingest_requests", pulse)
    _tell_waits(pulse)
    _tell_what_it_raises(scheduler)
    scheduler.run_scheduler_process(*args, **kwargs)


def _tell_times() -> None:
    """Have the scheduler send along when it began a request and when that had its first token.

    SGLang notes both for every request, and tells them only together with all that it counts for Prometheus.
    """
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats  # noqa: PLC0415

    told = SchedulerReqTimeStats.__getstate__

    def tells(times: Any) -> object:
        times.has_timing_data = True
        return told(times)

    SchedulerReqTimeStats.__getstate__ = tells


def _beat_at(cls: type, method: str, pulse: Pulse) -> None:
    """Every call of a method is a beat; an event loop makes one a round."""
    plain = getattr(cls, method)

    def beating(*args: Any, **kwargs: Any) -> Any:
        pulse.beat()
        return plain(*args, **kwargs)

    setattr(cls, method, beating)


def _tell_waits(pulse: Pulse) -> None:
    """Have the pulse say when this scheduler waits for others in a collective of host memory.

    All of torch.distributed waits there. Of one on a device it is the stream that waits.
    """
    plain = torch.distributed.Work.wait

    def telling(*args: Any, **kwargs: Any) -> Any:
        pulse.await_others(True)
        try:
            return plain(*args, **kwargs)
        finally:
            pulse.await_others(False)

    torch.distributed.Work.wait = telling  # type: ignore[method-assign]


def _tell_what_it_raises(module: Any) -> None:
    """Leave word of an exception that ends a process of SGLang's; it asks for the traceback, then ends the engine."""
    plain = module.get_exception_traceback

    def telling() -> Any:
        error = sys.exc_info()[1]
        assert error is not None, "it is asked where one is caught"
        write_raised(error)
        return plain()

    module.get_exception_traceback = telling


def packed_errand(errand: Errand) -> bytes:
    """An errand as one rank's payload of SGLang's `update_weights_from_tensor`; `load_errand` unpacks it."""
    body = torch.frombuffer(bytearray(pickle.dumps(errand)), dtype=torch.uint8)
    return pickle.dumps([(ERRAND, body)], protocol=4)


def load_errand(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader: runs an errand in the middle of a weight update."""
    ((name, body),) = named_tensors
    assert name == ERRAND, name
    _run(pickle.loads(body.cpu().numpy().tobytes()), model)


def _run_by_rpc(scheduler: Any, payload: str) -> None:
    errand = pickle.loads(bytes.fromhex(payload))
    _run(errand, scheduler.tp_worker.model_runner.model, scheduler)


def _run(errand: Errand | SchedulerErrand, model: torch.nn.Module, scheduler: Any = None) -> None:
    """An exception in here would end the scheduler, and with it the engine; the leader rank is to decide that."""
    try:
        outcome = Outcome(errand.run(model) if hasattr(errand, "run") else errand.run_in(scheduler))
    except Exception as error:  # noqa: BLE001  see above
        traceback.print_exc()
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    _leave(outcome)


def _leave(outcome: Outcome) -> None:
    """Where the leader's host looks: those of schedulers on other hosts are brought to its own."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    parallel = get_parallel()
    if parallel.nnodes == 1:
        write_outcome(parallel.tp_rank, outcome)
        return
    found: list[Any] | None = [None] * parallel.tp_size if parallel.tp_rank == 0 else None
    torch.distributed.gather_object(outcome, found, group=parallel.tp_group.cpu_group, group_dst=0)
    for rank, one in enumerate(found or ()):
        write_outcome(rank, one)
