"""What each rank of the checkpoint benchmark does: raw writes and reads, and ours, of the same bytes on one disk."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.checkpoint.folder import newest_whole, step_name
from rlhf.checkpoint.load import load
from rlhf.checkpoint.saver import Content, Saver
from rlhf.reshard.block import Block
from rlhf.reshard.layout import Box
from tools.benchmarks.measure import timed

SAVE, STALL, LOAD = "synchronous save", "stall of an asynchronous save", "checked and loaded"
CHECKED, READ = "checked", "read"
RAW_WRITE, DIRECT, RAW_READ = "raw write and fsync", "raw direct write and fsync", "raw read"
DIRECT_READ = "raw direct read"

CHUNK_BYTES = 8 * 2**20
"""Of a raw write or read, as `dd bs=8M` has them."""

TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is measured."""

    num_parameters: int
    """Of a model whose weights and moments are saved in fp32: 12 bytes each."""
    num_layers: int
    runs: int
    threads: int
    store: str
    answer: str
    """File that the first rank writes what it found to."""
    folder: str


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
    rank, folder = dist.get_rank(), Path(job.folder)
    blocks = _blocks(job)
    flat = [block.data.view(torch.uint8).view(-1) for block in blocks]
    kinds = {
        kind: Saver(
            folder / kind,
            group=dist.new_group(timeout=TIMEOUT),
            keep_last=1,
            keep_every=0,
            asynchronous=kind == STALL,
            note=print,
        )
        for kind in (SAVE, STALL)
    }
    seconds: dict[str, list[float]] = {}
    for step in range(job.runs + 1):  # the first warms up: files, host memory, the other ranks' connections
        raw, content = folder / f"raw{rank}_{step}", Content(blocks, {})
        for way, call, afterwards in _ways(kinds, raw, flat, blocks, step, content):
            dist.barrier()
            elapsed = torch.tensor([timed(lambda call=call: (call(), dist.barrier()))])  # type: ignore[misc]
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            afterwards()
            if step > 0:
                seconds.setdefault(way, []).append(float(elapsed[0]))
        raw.unlink()
    total = sum(len(one) for one in flat) * dist.get_world_size()
    for kind in kinds:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / kind)
    seconds[LOAD] = [a + b for a, b in zip(seconds[CHECKED], seconds[READ], strict=True)]
    return {"seconds": seconds, "bytes": total, "disk": _disk_of(folder)}


def _ways(
    kinds: dict[str, Saver], raw: Path, flat: list[Tensor], blocks: list[Block], step: int, content: Content
) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
    """(what, call that is timed, call afterwards) of one round."""
    checkpoint, nothing = raw.parent / SAVE, partial(int)
    return [
        (RAW_WRITE, partial(_write, raw, flat, 0), raw.unlink),
        (DIRECT, partial(_write, raw, flat, os.O_DIRECT), partial(_forget, raw.parent)),
        (SAVE, partial(kinds[SAVE].save, step, content), nothing),
        (STALL, partial(kinds[STALL].save, step, content), partial(_finish, kinds[STALL], raw.parent)),
        (RAW_READ, partial(_read, raw, 0), partial(_forget, raw.parent)),
        (DIRECT_READ, partial(_read, raw, os.O_DIRECT), nothing),
        (CHECKED, partial(newest_whole, checkpoint, group=dist.group.WORLD, note=print), nothing),
        (READ, partial(load, checkpoint / step_name(step), blocks, group=dist.group.WORLD), nothing),
    ]


def _finish(saver: Saver, folder: Path) -> None:
    saver.wait()
    dist.barrier()  # the first rank may still remove the checkpoint before
    _forget(folder)


def _blocks(job: Job) -> list[Block]:
    """This rank's layers of stacked weights, once as weights and twice as moments: random numbers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = job.num_layers // ranks
    columns = 1024
    rows = max(1, job.num_parameters // job.num_layers // columns // 2)
    blocks = []
    for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
        for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"):
            for layer in range(rank * own, (rank + 1) * own):
                box = Box(((layer, layer + 1), (0, rows), (0, columns)))
                key, shape = f"actor.{prefix}decoder.layers.{name}", (job.num_layers, rows, columns)
                blocks.append(Block(key, shape, box, torch.randn(box.shape)))
    return blocks


def _write(path: Path, flat: list[Tensor], flags: int) -> None:
    """What dd would do from memory. Direct writes take what is a multiple of a page; the blocks are, in the main."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    room = _on_a_page()
    for one in flat:
        for part in one.split(CHUNK_BYTES):
            if flags:
                memory, filled = room.numpy().data, len(part) // 4096 * 4096
                room[:filled] = part[:filled]
            else:
                memory, filled = part.numpy().data, len(part)
            at = 0
            while at < filled:
                at += os.write(handle, memory[at:filled])
    os.fsync(handle)
    os.close(handle)


def _read(path: Path, flags: int) -> None:
    memory = _on_a_page().numpy().data
    handle = os.open(path, os.O_RDONLY | flags)
    while os.readv(handle, [memory]):
        pass
    os.close(handle)


def _on_a_page() -> Tensor:
    """Memory for a chunk, as direct writes and reads want it."""
    room = torch.empty(CHUNK_BYTES + 4096, dtype=torch.uint8)
    return room[-room.data_ptr() % 4096 :][:CHUNK_BYTES]


def _forget(folder: Path) -> None:
    """Out of the page cache with all files, so that reads come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            try:
                handle = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # another rank's, which is done with it
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def _disk_of(folder: Path) -> str:
    """File system and device of a folder."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    device, _, kind = max(
        (one for one in mounts if folder.resolve().is_relative_to(one[1])), key=lambda one: len(one[1])
    )
    return f"{kind} on {device}"
