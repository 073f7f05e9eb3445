"""What the ranks of the test of two nodes do: four ranks on two pretended hosts, an engine on the middle two."""

import os
import signal
import socket
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from rlhf.config.rollout import RolloutConfig
from rlhf.dist.groups import GroupFactory
from rlhf.errors import EngineError, EngineLostError, LayoutError
from rlhf.reshard.topology import Link, Topology
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.sglang import engine as engine_module
from rlhf.rollout.sglang.engine import SGLangEngine
from rlhf.rollout.sglang.start import parties
from rlhf.rollout.sglang.team import Team
from tests.reshard.toy import filled_params
from tests.rollout.sglang.errands import FailsOn
from tests.rollout.sglang.listeners import addresses, check_closed, tree
from tests.rollout.sglang.weights.weight_ranks import CPU, LIMIT, Case, Engine


def engine_on_two_nodes(case: Case) -> None:
    """All that is checked with one engine."""
    torch.set_num_threads(1)
    factory, rank = GroupFactory(device_backend="gloo", timeout=LIMIT), dist.get_rank()
    interface, address = _interface()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    everyone = factory.cpu_group([tuple(range(4))])
    topology = Topology.blocks(4, ranks_per_node=2)
    engine = Engine(case, factory, host=f"host{topology.nodes[rank]}")
    sync = WeightSync(case.src, case.dst, topology=topology, group=everyone, bucket_bytes=60000, windowed=True)
    assert sync.certificate is not None
    processes: list[psutil.Process] = []
    try:
        for version, answers in enumerate(case.answers):
            stats = sync.update_weights(filled_params(case.src, rank, answers.weights), engine.params)
            assert stats.moved == stats.bound
            assert 0 < stats.received[Link.ACROSS_NODES] == stats.far_bound
            engine.check(answers, version)
        if engine.is_mine:
            processes = _each_node_has_its_host(engine.engine, address)
            _what_fails_is_named(engine.engine)
            _a_stopped_scheduler_is_named(engine.engine, processes)
            engine.engine.restart()
            processes += _each_node_has_its_host(engine.engine, address)
        answers = case.answers[1]
        stats = sync.update_weights(filled_params(case.src, rank, answers.weights), engine.params)
        assert stats.moved == stats.bound
        engine.check(answers, 7)
        if engine.is_mine:
            _death_is_named(engine.engine)
    finally:
        if engine.is_mine:
            engine.engine.close()
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def _each_node_has_its_host(engine: SGLangEngine, address: str) -> list[psutil.Process]:
    """With a scheduler; whatever listens does so on the interface of the job, or where no other user gets."""
    processes = tree(engine.host_pid)
    names = [" ".join(process.cmdline()) for process in processes]
    assert sum("scheduler" in name for name in names) == 1
    assert not [name for name in names if "detokenizer" in name]
    assert addresses(processes) == {address}
    check_closed(processes, engine._folder)
    return processes


def _what_fails_is_named(engine: SGLangEngine) -> None:
    for tp_rank in (0, 1):
        with pytest.raises(EngineError, match=f"tp rank {tp_rank}: ValueError: as asked"):
            engine.ask_schedulers(FailsOn(tp_rank))


def _a_stopped_scheduler_is_named(engine: SGLangEngine, processes: list[psutil.Process]) -> None:
    """That of the node which does not lead, on both ranks, within the promised time."""
    scheduler = next(process for process in processes if "scheduler" in " ".join(process.cmdline()))
    began = time.monotonic()
    if dist.get_rank() == 2:
        os.kill(scheduler.pid, signal.SIGSTOP)
    named = (
        r"its engine is lost: node 1 \(host host1\): scheduler tp 1 \(pid \d+\) is stopped \(state T\) while it was at"
    )
    with pytest.raises(EngineLostError, match=named):
        _ask_until_it_fails(engine)
    assert time.monotonic() - began < 30.0


def _death_is_named(engine: SGLangEngine) -> None:
    if dist.get_rank() == 2:
        os.kill(engine.host_pid, signal.SIGKILL)
    with pytest.raises(EngineLostError, match=r"node 1 \(host host1\): host \(pid \d+\) was ended by SIGKILL"):
        _ask_until_it_fails(engine)


def _ask_until_it_fails(engine: SGLangEngine) -> None:
    """The first question may be answered before the kill is through."""
    for _ in range(100):
        engine.ask_schedulers(FailsOn(7))
        time.sleep(0.2)


def _interface() -> tuple[str, str]:
    """One that leads out of this machine, where there is one, and its address."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and name in up
    ]
    return max(found, key=lambda one: not one[1].startswith("127."))


def uneven_nodes_are_refused() -> None:
    """Nothing is started."""
    group = GroupFactory(device_backend="gloo", timeout=LIMIT).cpu_group([(0, 1, 2)])
    with pytest.raises(LayoutError, match="lie on hosts a, a, b; needs as many on each host"):
        SGLangEngine(
            None,  # not looked at before
            RolloutConfig(engine="sglang", tp=3),
            tp_group=group,
            cpu_group=group,
            device=CPU,
            dtype=torch.float32,
            run_seed=3,
            eos_token_ids=(),
            host="aab"[dist.get_rank()],
        )


def a_wrong_interface_is_named() -> None:
    """On all ranks, before anything is started."""
    team = Team(GroupFactory(device_backend="gloo", timeout=LIMIT).cpu_group([(0, 1, 2, 3)]))
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    named = r"no address to listen on \(interface nosuch0 is not here or has no address\), .* set GLOO_SOCKET_IFNAME"
    with pytest.raises(EngineError, match=named), parties(team, team.nodes(CPU, "aabb"[dist.get_rank()])):
        pass
    with parties(team, team.nodes(CPU, "a")) as party:  # on one host it matters to nobody
        assert party is None


def sleep_counts_the_memory_of_all_hosts() -> None:
    """Each rank that has begun a host looks at that host's processes, before and after; the leader tells the sum."""
    group, rank = GroupFactory(device_backend="gloo", timeout=LIMIT).cpu_group([(0, 1, 2, 3)]), dist.get_rank()
    engine = SGLangEngine.__new__(SGLangEngine)  # without a start
    engine._team, engine._device = Team(group), CPU
    engine._awake, engine._lost_weights, engine._runs = True, False, False
    released: list[object] = []
    host = SimpleNamespace(pids=[rank], call=lambda *what: released.append(what))
    engine._host = host if rank in (0, 2) else None
    uses = {0: iter([5000, 1000]), 2: iter([300, 30])}
    engine_module.used_bytes = lambda device, pids: sum(next(uses[pid]) for pid in pids)
    assert engine.sleep() == (4270 if rank == 0 else 0)
    assert released == ([("release_memory", ("kv_cache",))] if rank == 0 else [])
    assert engine.sleep() == 0
    engine._awake, uses[0], uses[2] = True, iter([10, 20]), iter([10, 10])  # others took what it gave
    assert engine.sleep() == 0


def what_a_team_on_two_nodes_tells() -> None:
    """Of its starts and of a loss, with fakes in the place of hosts."""
    group, rank = GroupFactory(device_backend="gloo", timeout=LIMIT).cpu_group([(0, 1, 2, 3)]), dist.get_rank()
    team = Team(group)
    nodes = team.nodes(CPU, "aabb"[rank])
    began: list[int] = []
    team.on_nodes(nodes, lambda: began.append(rank))
    assert began == ([rank] if rank in (0, 2) else [])

    def fails() -> None:
        raise (EngineLostError if rank else EngineError)(f"rank {rank} has no luck")

    with pytest.raises(
        EngineLostError, match=r"^node 0 \(host a\): rank 0 has no luck\nnode 1 .*: rank 2 has no luck$"
    ):
        team.on_nodes(nodes, fails)
    team.ask_witnesses(nodes, lambda: f"seen by rank {rank}")

    def lost() -> None:
        raise EngineLostError("scheduler tp 0 raised")

    with pytest.raises(EngineLostError, match=r"^scheduler tp 0 raised\nnode 1 \(host b\): seen by rank 2$"):
        team.together(lost)
    with pytest.raises(EngineError, match=r"^rank 0 has no luck$"):
        team.together(fails)
