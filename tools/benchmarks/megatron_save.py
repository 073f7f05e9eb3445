"""A model in training on each rank's share: saved and loaded by us and by Megatron-Core's own writer, and trained on.

Megatron-Core saves as its training loop does: `sharded_state_dict` of the model and of the distributed optimizer in the
format that reshards (`fully_reshardable`, which gathers moments within dp), shared out over dp, torch_dist files.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from rlhf.checkpoint.folder import newest_whole, step_name
from rlhf.checkpoint.load import load
from rlhf.checkpoint.saver import Content, Saver
from rlhf.config.model import ModelConfig, OptimConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.data.batch import Sequences
from rlhf.data.ragged import Ragged
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import make_groups
from rlhf.mcore.load import draw_weights
from rlhf.mcore.model import build_model
from rlhf.mcore.model_state import model_blocks, optimizer_blocks
from rlhf.mcore.optimizer import build_optimizer
from rlhf.mcore.stored import extra_state_keys
from rlhf.mcore.train_step import train_step
from rlhf.reshard.block import Block
from rlhf.trainers.losses import make_answer_loss
from rlhf.trainers.sft import answer_rows
from tools.benchmarks.measure import timed
from tools.benchmarks.work import TINY

OURS, THEIRS, GATHER = "synchronous save", "dist_checkpointing.save", "of it: gathering the state"
LOAD, LOAD_THEIRS = "checked and loaded", "dist_checkpointing.load"
STALL, STEP, BESIDE = "stall of an asynchronous save", "training step", "training step beside a background save"

TIMEOUT = timedelta(seconds=300)
ROW_TOKENS = 256
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Megatron-Core's words for optimizer state that loads into any layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured."""

    spec: ModelSpec
    rows: int
    """Of ROW_TOKENS tokens, that a rank trains on in a step."""
    runs: int
    threads: int
    store: str
    answer: str
    """File that the first rank writes what it found to."""
    folder: str


def spec_of(*, quick: bool) -> ModelSpec:
    """The model: 82 million parameters, or the tiny one."""
    if quick:
        return TINY
    sizes = {"vocab_size": 16384, "hidden_size": 768, "ffn_size": 2048, "num_layers": 8, "num_heads": 12}
    return ModelSpec(**{name: getattr(TINY, name) for name in TINY.__slots__} | sizes | {"num_kv_heads": 12})


def main(rank: int, job: Job, num_ranks: int) -> None:
    """One rank, from its start to its end."""
    torch.set_num_threads(job.threads)
    store = dist.FileStore(job.store, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        found = _measure(job)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(job.answer).write_text(json.dumps(found), encoding="utf-8")


def _measure(job: Job) -> dict[str, object]:
    model = _Trained(job)
    ways = (
        (OURS, model.save),
        (LOAD, model.load),
        (THEIRS, model.save_theirs),
        (LOAD_THEIRS, model.load_theirs),
        (STEP, model.train),
        (STALL, model.save_in_background),
        (BESIDE, model.train),
    )
    seconds: dict[str, list[float]] = {}
    for run in range(job.runs + 1):  # the first warms up
        for way, call in ways:
            for name, value in {way: _together(call), **model.parts}.items():
                if run > 0:
                    seconds.setdefault(name, []).append(value)
            model.parts.clear()
        model.finish()
    folder = Path(job.folder)
    sizes = {
        kind: sum(path.stat().st_size for path in (folder / kind).rglob("*.distcp")) for kind in ("ours", "theirs")
    }
    dist.barrier()
    if dist.get_rank() == 0:
        for kind in ("ours", "theirs", "background"):
            shutil.rmtree(folder / kind)
    return {"seconds": seconds, "bytes": sizes}


def _together(call: Callable[[], object]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    elapsed = torch.tensor([timed(lambda: (call(), dist.barrier()))])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed[0])


class _Trained:
    """The model of this rank, its optimizer and its rows. The ranks of the job are its dp pool."""

    def __init__(self, job: Job) -> None:
        parallel = ParallelConfig(dp=dist.get_world_size())
        parallel_state.initialize_model_parallel()  # Megatron-Core's saving reads it; nothing of ours does
        groups = make_groups(parallel, GroupFactory(device_backend="gloo", timeout=TIMEOUT))
        self._model = build_model(
            job.spec,
            ModelConfig(path="none", init="random"),
            parallel,
            groups,
            head=Head.LM,
            device=torch.device("cpu"),
            seed=1,
            trainable=True,
        )
        draw_weights(self._model)
        self._optimizer = build_optimizer(self._model, OptimConfig())
        tokens = [torch.randint(job.spec.vocab_size, (ROW_TOKENS,)) for _ in range(job.rows)]
        self._rows = answer_rows(
            Sequences(
                sample_ids=torch.arange(job.rows),
                tokens=Ragged.of(tokens, dtype=torch.int64),
                response_lengths=torch.full((job.rows,), ROW_TOKENS - 1),
            )
        )
        self._loss = make_answer_loss(float(dist.get_world_size() * job.rows * (ROW_TOKENS - 1)))
        self._folder, self._everyone = Path(job.folder), dist.new_group(timeout=TIMEOUT)
        self._savers = {
            kind: Saver(
                self._folder / kind,
                group=dist.new_group(timeout=TIMEOUT),
                keep_last=1,
                keep_every=0,
                asynchronous=kind == "background",
                note=print,
            )
            for kind in ("ours", "background")
        }
        self._dp_cp = groups.collection.dp_cp if groups.collection is not None else None
        self._step = 0
        self.parts: dict[str, float] = {}
        """Seconds of parts of the last call."""
        self.train()  # moments are made in it

    def train(self) -> None:
        train_step(self._model, self._optimizer, self._rows, self._loss, microbatch_tokens=4 * ROW_TOKENS)

    def save(self) -> None:
        self._step += 1
        self._savers["ours"].save(self._step, self._content())

    def save_in_background(self) -> None:
        self._savers["background"].save(self._step, self._content())

    def finish(self) -> None:
        self._savers["background"].wait()

    def load(self) -> None:
        newest_whole(self._folder / "ours", group=self._everyone, note=print)
        blocks = self._blocks(own_share=False)
        load(self._folder / "ours" / step_name(self._step), blocks, group=self._everyone)

    def save_theirs(self) -> None:
        path = self._folder / "theirs"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        dist.barrier()
        strategy = FullyParallelSaveStrategyWrapper(
            TorchDistSaveShardedStrategy("torch_dist", 1), self._dp_cp, do_cache_distribution=True
        )
        with _no_gpu():
            state: list[dict[str, object]] = []
            self.parts[GATHER] = timed(lambda: state.append(self._state(is_loading=False)))
            dist_checkpointing.save(state[0], str(path), strategy)

    def load_theirs(self) -> None:
        """Into their state dict; what puts it into the optimizer is left out."""
        with _no_gpu():
            dist_checkpointing.load(self._state(is_loading=True), str(self._folder / "theirs"))

    def _blocks(self, *, own_share: bool) -> list[Block]:
        return [
            *model_blocks(self._model, own_share=own_share),
            *optimizer_blocks(self._model, self._optimizer, own_share=own_share),
        ]

    def _content(self) -> Content:
        return Content(self._blocks(own_share=True), {}, tuple(extra_state_keys(self._model.spec)))

    def _state(self, *, is_loading: bool) -> dict[str, object]:
        model = self._model.modules[0].sharded_state_dict(metadata={"dp_cp_group": self._dp_cp})
        metadata: Mapping[str, object] = {**FORMAT, "dp_cp_group": self._dp_cp}
        optimizer = self._optimizer.megatron.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}


@contextmanager
def _no_gpu() -> Iterator[None]:
    """Megatron-Core gathers through the GPU and waits for it; on a machine without one both are nothing."""
    with (
        patch.object(torch.Tensor, "cuda", lambda self: self),
        patch.object(torch.cuda, "current_device", partial(torch.device, "cpu")),
        patch.object(torch.cuda, "synchronize", lambda: None),
    ):
        yield
