"""What each rank of the resharding benchmark does: every way in turn, from the same source to the same destination."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.config.parallel import ParallelConfig
from rlhf.config.run import SyncConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import model_grid
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Topology
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.native.layout import native_layout
from tools.benchmarks.gathers import WAYS, Shards, flat_params, param_shapes, shard_elements
from tools.benchmarks.measure import timed
from tools.benchmarks.profile import profiled

OURS, SAMPLED, VERIFIED = "weight sync", "weight sync, a twentieth verified", "weight sync, verified"
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured."""

    spec: ModelSpec
    src: ParallelConfig
    engine_tp: int
    engines: int
    runs: int
    threads: int
    profile: bool
    store: str
    answer: str
    """File that rank 0 writes what it found to."""


def main(rank: int, job: Job) -> None:
    """One rank, from its start to its end."""
    torch.set_num_threads(job.threads)
    world = job.src.num_ranks
    store = dist.FileStore(job.store, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        found = _measure(job)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(job.answer).write_text(json.dumps(found), encoding="utf-8")


def _measure(job: Job) -> dict[str, object]:
    src = megatron_layout(job.spec, job.src, head=Head.LM, dtype="float32")
    dst = native_layout(job.spec, tp=job.engine_tp, dp=job.engines, first_rank=0, dtype="float32")
    everyone, replica, shards = _groups(job, src)
    own, full = torch.zeros(shards.longest), torch.zeros(len(shards.ranks), shards.longest)
    params = flat_params(src.holdings(dist.get_rank()), own)
    for piece in src.holdings(dist.get_rank()):  # what ranks hold alike is equal
        generator = torch.Generator().manual_seed(crc32(f"{piece.tensor} {piece.box.spans}".encode()))
        block = params[piece.param][piece.param_box(piece.box).slices]
        block.copy_(torch.randn(block.shape, generator=generator))
    landed = {name: torch.zeros(shape) for name, shape in param_shapes(dst.holdings(dist.get_rank())).items()}

    topology = Topology.blocks(dist.get_world_size(), ranks_per_node=dist.get_world_size())
    syncs = {
        name: WeightSync(
            src,
            dst,
            topology=topology,
            group=everyone,
            bucket_bytes=SyncConfig().bucket_bytes,
            verify=verify,
        )
        for name, verify in ((VERIFIED, Verify.ALL), (SAMPLED, Verify.SAMPLE), (OURS, Verify.NONE))
    }
    ways: dict[str, Callable[[], object]] = {
        name: partial(sync.update_weights, params, landed) for name, sync in syncs.items()
    }
    received = {}
    for way in WAYS:
        one = way(src, dst, shards=shards, group=replica, own=own, full=full, landed=landed)
        ways[way.name], received[way.name] = one.run, one.received_bytes()
    seconds = _take_turns(ways, job.runs, landed)
    stats = syncs[VERIFIED].update_weights(params, landed)
    found = {
        "seconds": seconds,
        "bytes": {OURS: stats.moved, **{name: _sum(count) for name, count in received.items()}},
        "bound": stats.bound,
    }
    if job.profile:
        call = partial(syncs[VERIFIED].update_weights, params, landed)
        found["profile"] = profiled(call) if dist.get_rank() == 0 else call()
    return found


def _groups(job: Job, src: ModelLayout) -> tuple[ProcessGroup, ProcessGroup, Shards]:
    """The ranks of both pools; this rank's replica of the source; the shards of that."""
    factory, grid = GroupFactory(device_backend="gloo", timeout=TIMEOUT), model_grid(job.src)
    replicas = grid.groups("tp", "pp")
    everyone, replica = factory.cpu_group([tuple(grid.ranks)]), factory.cpu_group(replicas)
    assert everyone is not None, "every rank is in both pools"
    assert replica is not None, "every rank is in a replica"
    mine = next(ranks for ranks in replicas if dist.get_rank() in ranks)
    return everyone, replica, Shards(mine, tuple(shard_elements(src.holdings(rank)) for rank in mine))


def _take_turns(
    ways: Mapping[str, Callable[[], object]], runs: int, landed: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Seconds of each way until all ranks are done, after a round that warms up and compares what arrived."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    first: dict[str, Tensor] = {}
    for turn in range(runs + 1):
        for name, call in ways.items():
            for tensor in landed.values() if turn == 0 else ():
                tensor.zero_()
            dist.barrier()
            took = timed(partial(_until_all_are_done, call))
            if turn:
                seconds[name].append(took)
            elif not first:
                first = {key: tensor.clone() for key, tensor in landed.items()}
            else:
                wrong = [key for key, tensor in landed.items() if not torch.equal(tensor, first[key])]
                assert not wrong, f"{name} and {VERIFIED} differ in {wrong}"
    return seconds


def _until_all_are_done(call: Callable[[], object]) -> None:
    call()
    dist.barrier()


def _sum(count: int) -> int:
    total = torch.tensor([count])
    dist.all_reduce(total)
    return int(total)
