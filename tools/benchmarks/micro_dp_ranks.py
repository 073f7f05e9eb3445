"""What each rank of the micro_dp benchmark does: for each size of engine in turn, take the weights, then generate."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.config.parallel import ParallelConfig
from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.sync import SyncConfig
from rlhf.data.batch import PromptBatch, PromptRecord
from rlhf.data.ragged import Ragged
from rlhf.dist.grid import Grid
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.topology import Topology
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.native.engine import NativeEngine
from tools.benchmarks.gathers import flat_params, shard_elements
from tools.benchmarks.measure import timed

TIMEOUT = timedelta(seconds=120)
STD = 0.02
"""Of the drawn weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured."""

    spec: ModelSpec
    src: ParallelConfig
    sizes: tuple[int, ...]
    """Tensor-parallel sizes of the engines; each divides the number of ranks."""
    rows: int
    prompt_tokens: int
    new_tokens: int
    """Of each of the rows, which the engines share."""
    runs: int
    threads: int
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


def _measure(job: Job) -> dict[str, dict[str, object]]:
    factory = GroupFactory(device_backend="gloo", timeout=TIMEOUT)
    everyone = factory.cpu_group([tuple(range(job.src.num_ranks))])
    assert everyone is not None, "every rank is in both pools"
    params = _drawn(job)
    micro = {size: _Engines(job, size, factory, everyone) for size in job.sizes}
    found: dict[str, dict[str, object]] = {
        str(size): {"switch": [], "generate": [], "moved": one.moved, "bound": one.bound} for size, one in micro.items()
    }
    for turn in range(job.runs + 1):  # the first warms up
        for size, one in micro.items():
            switch, generate = one.step(params)
            if turn:
                for name, seconds in (("switch", switch), ("generate", generate)):
                    of_size = found[str(size)][name]
                    assert isinstance(of_size, list)
                    of_size.append(seconds)
    return found


class _Engines:
    """This rank's engine of one size, asleep between its turns, and the sync into all engines of that size."""

    def __init__(self, job: Job, tp: int, factory: GroupFactory, everyone: ProcessGroup) -> None:
        world, rank = job.src.num_ranks, dist.get_rank()
        grid = Grid(("tp", "dp"), (tp, world // tp))
        at, group = grid.coords(rank), factory.cpu_group(grid.groups("tp"))
        rows = range(at["dp"], job.rows, grid.size("dp"))
        self._sampling = SamplingConfig(max_new_tokens=job.new_tokens, ignore_eos=True)
        config = RolloutConfig(
            tp=tp,
            dp=grid.size("dp"),
            max_running=max(1, len(rows)),
            kv_cache_tokens=max(1, len(rows)) * (job.prompt_tokens + job.new_tokens + 16),
            sampling=self._sampling,
        )
        self._engine = NativeEngine(
            job.spec,
            config,
            tp_group=group if tp > 1 else None,
            cpu_group=group if tp > 1 else None,
            device=torch.device("cpu"),
            dtype=torch.float32,
            run_seed=1,
            eos_token_ids=(),
        )
        self._engine.sleep()
        self._sync = WeightSync(
            megatron_layout(job.spec, job.src, head=Head.LM, dtype="float32"),
            self._engine.layout(),
            topology=Topology.blocks(world, ranks_per_node=world),
            group=everyone,
            bucket_bytes=SyncConfig().bucket_bytes,
        )
        assert self._sync.certificate is not None, "every rank is in both pools"
        self.moved, self.bound = self._sync.certificate.moved, self._sync.certificate.bound
        self._prompts = _prompts(job, rows) if at["tp"] == 0 else None

    def step(self, params: dict[str, Tensor]) -> tuple[float, float]:
        """Seconds of the switch and of the generation, each until all ranks are done."""
        switch = _until_all_are_done(lambda: self._sync.update_weights(params, self._engine.params()))
        self._engine.weights_updated(1)
        self._engine.wake()
        generate = _until_all_are_done(lambda: self._engine.generate(self._prompts, self._sampling))
        self._engine.sleep()
        return switch, generate


def _drawn(job: Job) -> dict[str, Tensor]:
    """This rank's training shard."""
    held = megatron_layout(job.spec, job.src, head=Head.LM, dtype="float32").holdings(dist.get_rank())
    params = flat_params(held, torch.empty(shard_elements(held)))
    generator = torch.Generator().manual_seed(dist.get_rank() % job.src.tp)
    for tensor in params.values():
        tensor.normal_(std=STD, generator=generator)
        if tensor.dim() == 1:
            tensor.fill_(1.0)
    return params


def _prompts(job: Job, rows: range) -> PromptBatch:
    """The rows of one engine; every sample has the same prompt tokens whichever engine takes it."""
    tokens = [(torch.arange(job.prompt_tokens) * 7 + row * 31) % job.spec.vocab_size for row in rows]
    return PromptBatch(
        sample_ids=torch.tensor(list(rows), dtype=torch.int64),
        prompt_ids=torch.tensor(list(rows), dtype=torch.int64),
        tokens=Ragged.of(tokens, dtype=torch.int64),
        records=(PromptRecord("", "", {}),) * len(rows),
    )


def _until_all_are_done(call: Callable[[], object]) -> float:
    def run() -> None:
        call()
        dist.barrier()

    dist.barrier()
    return timed(run)
