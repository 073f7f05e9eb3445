"""What the host process of an engine is told at its start, on each host that the engine lies on."""

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.config.rollout import RolloutConfig
from rlhf.config.sglang import BY_SEED
from rlhf.dist.job import environment_of_no_rank
from rlhf.dist.network import own_address
from rlhf.errors import EngineError
from rlhf.families.spec import ModelSpec
from rlhf.rollout.sglang.cpu import cpu_environment
from rlhf.rollout.sglang.meeting import environment_on_one_host, environment_on_several_hosts, open_meeting
from rlhf.rollout.sglang.nodes import WHERE, Nodes
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


def place_of(nodes: Nodes, party: Party | None, *, tp_rank: int, device: str, dtype: str) -> Place:
    """Where SGLang's processes of this rank's host run."""
    number = nodes.of(tp_rank)
    own = nodes.parts[number]
    meets_at = ""
    if party is not None:
        address = party.meeting.address
        meets_at = f"{f'[{address}]' if ':' in address else address}:{party.meeting.port}"
    return Place(device, own.first_gpu, own.gpu_step, dtype, len(nodes.parts), number, meets_at)


def order_of(
    spec: ModelSpec,
    config: RolloutConfig,
    place: Place,
    *,
    folder: Path,
    run_seed: int,
    decode: Decode | None,
    party: Party | None,
) -> Order:
    """What a host is to start; `folder` holds a config.json."""
    return Order(
        parent=os.getpid(),
        cpu=place.device == "cpu",
        server_args=server_args(spec, config, place=place, model_folder=folder, run_seed=run_seed),
        by_seed=config.sglang.sampling_backend == BY_SEED,
        decode=b"" if decode is None else pickle.dumps(decode),
        party=party,
    )


def environment_of(
    place: Place, party: Party | None, *, folder: Path, first_rank: int, num_ranks: int, threads: int
) -> dict[str, str]:
    """Variables of a host's processes: of `num_ranks` ranks from first_rank on, `threads` threads each on CPUs."""
    changes = ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    if party is None:
        changes |= environment_on_one_host(folder)
    else:
        changes |= environment_on_several_hosts(folder, party.meeting)
    if place.device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        changes |= cpu_environment(num_ranks, leader=first_rank, threads=threads, cores=cores)
    return environment_of_no_rank(**changes)
