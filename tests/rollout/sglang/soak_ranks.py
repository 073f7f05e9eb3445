"""What the two ranks of the soak test do: syncs and rollouts in a row, while the memory of every process is read."""

from datetime import timedelta
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.dist.agree import gather
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import ModelSpec
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Topology
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.sglang.engine import SGLangEngine
from tests.reshard.toy import filled_params, full_tensors
from tests.rollout.tiny import prompts

CPU = torch.device("cpu")
ROUNDS, EVERY = 200, 4
"""Memory is read every so many rounds: that takes longer than a sync."""
WARM, WINDOW = 15, 10
"""The first readings are of pools that fill; the WINDOW readings after those are compared with the last ones."""
MIB = 2**20
SLACK = 6 * MIB
"""Less than a tenth of a copy of the weights a round, and less than one region of the transfer kept at all."""


def soak(spec: ModelSpec, src: ModelLayout, dst: ModelLayout, folder: Path) -> None:
    """Every round brings all weights in and samples by them; the memory of no process grows."""
    torch.set_num_threads(1)
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=120))
    group = factory.cpu_group([(0, 1)])
    actor = filled_params(src, dist.get_rank(), {name: t.sin() * 0.05 for name, t in full_tensors(src.tensors).items()})
    sync = WeightSync(src, dst, topology=Topology.blocks(2, ranks_per_node=2), group=group, windowed=True)
    sampling, leads = SamplingConfig(max_new_tokens=8), dist.get_rank() == 0
    shm = _in_shm()
    engine = SGLangEngine(
        spec,
        RolloutConfig(engine="sglang", tp=2, kv_cache_tokens=2048),
        tp_group=group,
        cpu_group=group,
        device=CPU,
        dtype=torch.float32,
        run_seed=3,
        eos_token_ids=(),
        log_folder=folder,
    )
    try:
        took: list[dict[str, int]] = []
        for version in range(ROUNDS):
            engine.wake()
            for param in actor.values():
                param.mul_(1.0001)
            sync.update_weights(actor, engine.params())
            engine.weights_updated(version)
            rollout = engine.generate(prompts() if leads else None, sampling)
            assert rollout is None or rollout.policy_versions.values.eq(version).all()
            engine.sleep()
            if version % EVERY == 0:
                took.append(_memory(engine.host_pid if leads else None))
            assert _in_shm() == shm, f"round {version} left something in /dev/shm"
        grown = {name: _grown([one[name] for one in took]) for name in took[0]}
        assert all(one.keys() == took[0].keys() for one in took), "processes came or went"
    finally:
        engine.close()
    for rank, of_rank in enumerate(gather(grown, group)):
        assert max(of_rank.values()) < SLACK, f"rank {rank}: bytes more after {ROUNDS} rounds, by process: {of_rank}"


def _memory(host: int | None) -> dict[str, int]:
    """Bytes that only this process and those of its engine hold (their own, not files mapped), by process."""
    processes = {"rank": psutil.Process()}
    if host is not None:
        processes["host"] = psutil.Process(host)
        for child in processes["host"].children(recursive=True):
            processes[f"{child.name()} {child.pid}"] = child
    return {name: process.memory_full_info().uss for name, process in processes.items()}


def _grown(bytes_: list[int]) -> int:
    return int(median(bytes_[-WINDOW:]) - median(bytes_[WARM : WARM + WINDOW]))


def _in_shm() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").iterdir())
