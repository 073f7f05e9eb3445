"""How the host processes of an engine are started, one on each host that the engine lies on."""

import json
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf.config.rollout import RolloutConfig
from rlhf.config.sglang import BY_SEED
from rlhf.dist.job import environment_of_no_rank
from rlhf.dist.network import own_address
from rlhf.errors import EngineError
from rlhf.families.registry import hf_config
from rlhf.families.spec import ModelSpec
from rlhf.rollout.sglang.cpu import cpu_environment
from rlhf.rollout.sglang.life.process import HostProcess
from rlhf.rollout.sglang.multi_host.meeting import (
    environment_on_one_host,
    environment_on_several_hosts,
    meeting_place,
    open_meeting,
)
from rlhf.rollout.sglang.multi_host.nodes import WHERE, Nodes
from rlhf.rollout.sglang.server_args import ENVIRONMENT, Place, server_args
from rlhf.rollout.sglang.team import Team
from rlhf.rollout.sglang.wire import Order, Party
from rlhf.rollout.stopping import Decode


@contextmanager
def parties(team: Team, nodes: Nodes) -> Iterator[Party | None]:
    """This rank's part of an engine on several hosts, None on one; while they start. Collective over the team.

    Raises:
        EngineError: The leader cannot listen on the interface of the job. On all ranks.
    """
    if len(nodes.parts) == 1:
        yield None
        return
    listening: list[socket.socket] = []

    def opened() -> Party:
        interface = environment_of_no_rank().get("GLOO_SOCKET_IFNAME", "")
        try:
            found, meeting = open_meeting(own_address(interface))
        except OSError as error:
            raise EngineError(
                f"{WHERE}: no address to listen on ({error}), though its ranks lie on several hosts; needs an "
                "interface that leads to all of them; set GLOO_SOCKET_IFNAME"
            ) from error
        listening.append(found)
        return Party(0, tuple(map(nodes.title, range(len(nodes.parts)))), meeting, found.fileno())

    first = team.tell(team.together(opened))
    node = nodes.of(team.rank)
    try:
        yield first if team.is_leader else Party(node, first.titles, first.meeting)
    finally:
        for one in listening:  # the host has a descriptor of its own
            one.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStart:
    """How the host processes of one engine are started; the same on all its ranks."""

    spec: ModelSpec
    config: RolloutConfig
    device: str
    """cpu or cuda."""
    dtype: str
    run_seed: int
    decode: Decode | None
    log_folder: Path | None
    on_wait: Callable[[], None]

    def folder(self) -> Path:
        """A new one for a host: the model's description, temporary files, sockets; closed to other users."""
        made = Path(tempfile.mkdtemp(prefix=f"rlhf_{os.getpid()}_engine_"))
        # Requests say what ends them; left out, the family's own default would end them too (2 of every llama).
        described = hf_config(self.spec, dtype=self.dtype) | {"eos_token_id": None}
        (made / "config.json").write_text(json.dumps(described))
        return made

    def begin(self, folder: Path, nodes: Nodes, party: Party | None, team: Team) -> HostProcess:
        """Start the host of this rank's node, and wait until it is ready.

        Raises:
            EngineError: As `HostProcess`.
        """
        options, number = self.config.sglang, nodes.of(team.rank)
        own, rank = nodes.parts[number], dist.get_rank() if dist.is_initialized() else 0
        meets_at = "" if party is None else meeting_place(party.meeting)
        place = Place(self.device, own.first_gpu, own.gpu_step, self.dtype, len(nodes.parts), number, meets_at)
        return HostProcess(
            Order(
                parent=os.getpid(),
                cpu=self.device == "cpu",
                server_args=server_args(
                    self.spec, self.config, place=place, model_folder=folder, run_seed=self.run_seed
                ),
                by_seed=options.sampling_backend == BY_SEED,
                decode=b"" if self.decode is None else pickle.dumps(self.decode),
                party=party,
            ),
            python=options.python,
            environment=self._environment(folder, nodes, party, team, first_rank=rank),
            folder=folder,
            log_path=(self.log_folder or folder) / f"engine_{rank}.log",
            start_limit_s=options.start_limit_s,
            reply_limit_s=options.reply_limit_s,
            on_wait=self.on_wait,
            open_files=() if party is None or party.listening is None else (party.listening,),
        )

    def _environment(
        self, folder: Path, nodes: Nodes, party: Party | None, team: Team, *, first_rank: int
    ) -> dict[str, str]:
        threads = max(1, torch.get_num_threads() * team.size // self.config.tp)
        changes = ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
        if party is None:
            changes |= environment_on_one_host(folder)
        else:
            changes |= environment_on_several_hosts(folder, party.meeting)
        if self.device == "cpu":
            cores, ranks_here = sorted(os.sched_getaffinity(0)), self.config.tp // len(nodes.parts)
            changes |= cpu_environment(ranks_here, leader=first_rank, threads=threads, cores=cores)
        return environment_of_no_rank(**changes)
