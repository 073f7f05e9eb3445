"""Life of the job's processes, from the first line of a rank to its last. The one file that reads the environment."""

import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import psutil
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.config.job import JobConfig
from rlhf.dist.ending import Ending, end_children
from rlhf.dist.exit_record import ExitCode, ExitRecord, clear_marks, exit_path, write_over
from rlhf.dist.groups import GroupFactory
from rlhf.dist.heartbeat import FINISHED, Heart
from rlhf.dist.progress_clock import ProgressClock
from rlhf.dist.rank_logs import RankLogs
from rlhf.dist.signals import SignalThread
from rlhf.dist.stop_request import StopRequest
from rlhf.dist.watchdog import Limits, Watchdog
from rlhf.errors import ConfigError

log = logging.getLogger(__name__)

CAUSE_S = 1.5
"""On one host a dead process is seen at once; a dead host only by the silence of its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This rank's place in the job, and what it needs to live there."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    device: torch.device
    """Where models live: this rank's GPU, or the CPU."""
    groups: GroupFactory
    run_folder: Path
    progress: ProgressClock
    """Every long loop calls `progress.tick(phase)`."""
    stop: StopRequest
    """The loop asks `stop.agreed(group)` at step boundaries."""
    wandb_online: bool
    """WANDB_API_KEY is set, so that a tracker may upload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """What the launcher says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    torchrun: bool
    """Started by torchrun; else alone, as under a debugger."""
    launcher: int
    """Process id of scripts/launch.sh, which clears old marks and completes the exit record; 0 without one."""

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def watched(self) -> tuple[int, ...]:
        """The other ranks of this host, and the one at this place on the next host."""
        first = self.rank - self.local_rank
        near = range(first, first + self.local_world_size)
        return tuple(sorted({*near, (self.rank + self.local_world_size) % self.world_size} - {self.rank}))


def _read_place() -> _Place:
    env = os.environ  # noqa: TID251
    torchrun = "RANK" in env
    if "RLHF_NODE_RANK" in env:  # c10d rendezvous numbers the nodes by their addresses, users by --node-rank
        env["RANK"] = str(int(env["RLHF_NODE_RANK"]) * int(env["LOCAL_WORLD_SIZE"]) + int(env["LOCAL_RANK"]))
    return _Place(
        rank=int(env.get("RANK", "0")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        torchrun=torchrun,
        launcher=int(env.get("RLHF_LAUNCHER_PID", "0")),
    )


_OF_A_RANK = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_.*|OMP_NUM_THREADS|SGLANG_.*|"
    r"PYTORCH_(CUDA_)?ALLOC_CONF"
)


def environment_of_no_rank(**changes: str) -> dict[str, str]:
    """This process's environment for a child that must not take itself for a rank of the job, with some changes.

    Without the launcher's variables (with TORCHELASTIC_USE_AGENT_STORE a group of the child's own would wait for ever)
    and without SGLANG_*, whose options come from the config, and the allocator's settings, which are for training:
    SGLang's memory saver does not start with expandable segments. The job's marks stay: by them the child is found and
    ended.
    """
    kept = {name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)}  # noqa: TID251
    return kept | changes


def _bind_loopback() -> None:
    """Ranks of one host talk over the loopback interface, unless the user chose another."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # noqa: TID251


def _choose_device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ConfigError(
            f"job.device: {wanted} given, but this host shows {num_gpus} GPUs to local rank {local_rank}; needs one a "
            f"rank; start at most {num_gpus} ranks on it, or set job.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _init_groups(config: JobConfig, place: _Place, device: torch.device) -> GroupFactory:
    """Join the job. Collective over all its ranks."""
    timeout = timedelta(seconds=config.collective_timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if place.torchrun:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return GroupFactory(device_backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)


def _num_threads(config: JobConfig, place: _Place) -> int:
    return config.torch_threads or max(1, len(os.sched_getaffinity(0)) // place.local_world_size)


@dataclass(frozen=True, slots=True)
class CpuRanks:
    """The processes of a command without a run: this one's place and a gloo group of them all."""

    rank: int
    world_size: int
    groups: GroupFactory
    everyone: ProcessGroup


@contextmanager
def cpu_ranks(*, timeout_s: float) -> Iterator[CpuRanks]:
    """For commands on CPUs that run alone or under torchrun: no run folder, no watch over peers, no exit record.

    Entered by every process, on its main thread. SIGTERM, which torchrun sends to the peers of a process that failed,
    ends the block with SystemExit, so that what it has opened is closed.
    """
    place = _read_place()
    if place.one_host:
        _bind_loopback()
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    threads = os.environ.get("OMP_NUM_THREADS")  # noqa: TID251
    if threads is None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
    groups = _init_groups(JobConfig(device="cpu", collective_timeout_s=timeout_s), place, torch.device("cpu"))
    everyone = groups.cpu_group([tuple(range(place.world_size))])
    assert everyone is not None, "every rank is one of all"
    try:
        yield CpuRanks(place.rank, place.world_size, groups, everyone)
    finally:
        dist.destroy_process_group()
        signal.signal(signal.SIGTERM, before)


class job:  # noqa: N801  # reads as `with job(config) as ranks`
    """The process group, device, log files, signals, watchdog and exit record of this rank.

    `with job(config, run_folder=...) as ranks:` is entered by every rank of the job, on its main thread. Leaving it
    well is collective (all ranks wait for one another). A rank whose body raises does not come out: it writes its
    traceback into its log and, as the first to fail, on the console, ends its children and calls os._exit.

    Raises:
        ConfigError: On entering, when the device asked for is not there.
    """

    def __init__(self, config: JobConfig, *, run_folder: Path) -> None:
        self._config, self._run_folder = config, run_folder.absolute()
        self._place = _read_place()

    def __enter__(self) -> Ranks:
        place, host = self._place, socket.gethostname()
        if place.rank == 0 and not place.launcher and self._run_folder.exists():
            clear_marks(self._run_folder)
        self._children_before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._logs = RankLogs(self._run_folder, place.rank)
        self._clock = ProgressClock()
        self._heart = Heart(self._run_folder, rank=place.rank, host=host, clock=self._clock)
        limits = Limits(alive_s=self._config.alive_limit_s, progress_s=self._config.progress_limit_s)
        self._watchdog = Watchdog(
            self._run_folder,
            heart=self._heart,
            clock=self._clock,
            watched=place.watched,
            limits=limits,
            launched=place.launcher != 0,
            on_blame=lambda blame: self._ending.blamed(blame),
            on_ended=lambda: self._ending.followed(),
        )
        self._ending = Ending(
            self._run_folder,
            heart=self._heart,
            logs=self._logs,
            peers=self._watchdog.peers,
            launcher=place.launcher,
            patience_s=CAUSE_S if place.one_host else limits.alive_s + 2 * limits.period_s,
        )
        self._stop = StopRequest(self._run_folder)
        self._signals = SignalThread(
            {signal.SIGTERM: self._ending.terminated, signal.SIGUSR1: lambda: self._stop.path.touch()}
        )
        self._watchdog.start()
        return self._join(host)

    def _join(self, host: str) -> Ranks:
        place = self._place
        try:
            if place.one_host:
                _bind_loopback()
            torch.set_num_threads(_num_threads(self._config, place))
            device = _choose_device(self._config.device, place.local_rank)
            groups = _init_groups(self._config, place, device)
            self._everyone = groups.cpu_group([tuple(range(place.world_size))])
        except (ConfigError, RuntimeError, ValueError) as error:
            self._ending.raised(error)
        log.info("%s, rank %d of %d on %s", device, place.rank, place.world_size, host)
        self._clock.tick("start")
        return Ranks(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            host=host,
            device=device,
            groups=groups,
            run_folder=self._run_folder,
            progress=self._clock,
            stop=self._stop,
            wandb_online="WANDB_API_KEY" in os.environ,  # noqa: TID251
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            if not self._place.torchrun and sys.gettrace() is not None:
                self._release()  # a debugger wants to see where it happened
                return
            self._ending.raised(error)
        try:
            with self._clock.waiting("waiting for all ranks to finish"):
                dist.barrier(self._everyone)
        except RuntimeError as lost:
            self._ending.raised(lost)
        code = ExitCode.STOPPED if self._stop.accepted else ExitCode.FINISHED
        if self._place.rank == 0:
            reason = "stopped on request" if self._stop.accepted else "finished"
            write_over(exit_path(self._run_folder), ExitRecord(code=code, reason=reason))
        self._heart.beat(FINISHED)
        self._release()
        if code and not self._place.torchrun:  # torchrun would take any code but 0 for a failure
            raise SystemExit(int(code))

    def _release(self) -> None:
        self._watchdog.close()
        self._signals.close()
        dist.destroy_process_group()
        end_children(but=self._children_before)
        self._logs.close()
