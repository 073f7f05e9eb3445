"""What each rank of the resharding benchmark does: every way in turn, from the same source to the same destination."""

import json
import warnings
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
from rlhf.config.sync import SyncConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import model_grid
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Topology
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.native.layout import native_layout
from tools.benchmarks.gathers import WAYS, Shards, flat_params, param_shapes, shard_elements
from tools.benchmarks.limits import CopyLimit, PeerLimit
from tools.benchmarks.measure import timed
from tools.benchmarks.profile import profiled

OURS, SAMPLED, VERIFIED = "weight sync", "weight sync, a twentieth verified", "weight sync, verified"
PEER_LIMIT, COPY_LIMIT = "gloo p2p of the same bytes", "one copy of each shard"
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured."""

    spec: ModelSpec
    src: ParallelConfig
    engine_tp: int
    engines: int
    stride: int
    to_engines: bool
    to_megatron: bool
    """Into Megatron models of the engines' sizes."""
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
        found = {}
        if job.to_engines:
            found["engines"] = _measure(job)
        if job.to_megatron:
            found["megatron"] = _measure_megatron(job)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(job.answer).write_text(json.dumps(found), encoding="utf-8")


def _measure(job: Job) -> dict[str, object]:
    src = megatron_layout(job.spec, job.src, head=Head.LM, dtype="float32")
    dst = native_layout(job.spec, tp=job.engine_tp, dp=job.engines, first_rank=0, stride=job.stride, dtype="float32")
    factory = GroupFactory(device_backend="gloo", timeout=TIMEOUT)
    everyone, replica, shards = _groups(job, src, factory)
    own, full = torch.zeros(shards.longest), torch.zeros(len(shards.ranks), shards.longest)
    params = flat_params(src.holdings(dist.get_rank()), own)
    _fill(src, params)
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
    limits: dict[str, Callable[[], object]] = {
        PEER_LIMIT: PeerLimit(make_plan(src, dst, topology), everyone, full.view(-1)).run,
        COPY_LIMIT: CopyLimit(list(landed.values()), full.view(-1)).run,
    }
    received = {}
    for way in WAYS:
        one = way(src, dst, shards=shards, group=replica, own=own, full=full, landed=landed)
        ways[way.name], received[way.name] = one.run, one.received_bytes()
    seconds = _take_turns(ways, limits, job.runs, landed)
    stats = syncs[VERIFIED].update_weights(params, landed)
    found = {
        "seconds": seconds,
        "bytes": {OURS: stats.moved, **{name: _sum(count) for name, count in received.items()}},
        "bound": stats.bound,
    }
    if job.profile:
        call = partial(syncs[OURS].update_weights, params, landed)
        found["profile"] = profiled(call) if dist.get_rank() == 0 else call()
    return found


def _measure_megatron(job: Job) -> dict[str, object]:
    from tools.benchmarks.megatron_pair import MegatronPair  # noqa: PLC0415  # the other measurement needs no models

    warnings.filterwarnings("ignore", message="full scope is deprecated")  # of Megatron-Core's own default
    factory = GroupFactory(device_backend="gloo", timeout=TIMEOUT)
    everyone = factory.cpu_group([tuple(range(dist.get_world_size()))])
    assert everyone is not None, "every rank is in both pools"
    dst = ParallelConfig(tp=job.engine_tp, dp=job.engines)
    pair = MegatronPair(job.spec, job.src, dst, factory, everyone)
    _fill(pair.source_layout, pair.source)
    return {"seconds": _take_turns(pair.ways(), {}, job.runs, pair.landed)}


def _fill(layout: ModelLayout, params: Mapping[str, Tensor]) -> None:
    """Numbers that differ from place to place; what ranks hold alike is equal."""
    for piece in layout.holdings(dist.get_rank()):
        generator = torch.Generator().manual_seed(crc32(f"{piece.tensor} {piece.box.spans}".encode()))
        block = params[piece.param][piece.param_box(piece.box).slices]
        block.copy_(torch.randn(block.shape, generator=generator))


def _groups(job: Job, src: ModelLayout, factory: GroupFactory) -> tuple[ProcessGroup, ProcessGroup, Shards]:
    """The ranks of both pools; this rank's replica of the source; the shards of that."""
    grid = model_grid(job.src)
    replicas = grid.groups("tp", "pp")
    everyone, replica = factory.cpu_group([tuple(grid.ranks)]), factory.cpu_group(replicas)
    assert everyone is not None, "every rank is in both pools"
    assert replica is not None, "every rank is in a replica"
    mine = next(ranks for ranks in replicas if dist.get_rank() in ranks)
    return everyone, replica, Shards(mine, tuple(shard_elements(src.holdings(rank)) for rank in mine))


def _take_turns(
    ways: Mapping[str, Callable[[], object]],
    limits: Mapping[str, Callable[[], object]],
    runs: int,
    landed: Mapping[str, Tensor],
) -> dict[str, list[float]]:
    """Seconds of each way until all ranks are done, after a round that warms up and compares what arrived.

    `limits` move bytes of no meaning: what they leave is not compared, and they come last in each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, *limits)}
    first: dict[str, int] = {}
    for turn in range(runs + 1):
        for name, call in {**ways, **limits}.items():
            for tensor in landed.values() if turn == 0 else ():
                tensor.zero_()
            dist.barrier()
            took = timed(partial(_until_all_are_done, call))
            if turn:
                seconds[name].append(took)
            elif name in ways:
                found = {key: crc32(tensor.numpy().data) for key, tensor in landed.items()}
                first = first or found
                wrong = [key for key in landed if found[key] != first[key]]
                assert not wrong, f"{name} and {next(iter(ways))} land different weights in {wrong}"
    return seconds


def _until_all_are_done(call: Callable[[], object]) -> None:
    call()
    dist.barrier()


def _sum(count: int) -> int:
    total = torch.tensor([count])
    dist.all_reduce(total)
    return int(total)
