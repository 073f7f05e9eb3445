"""What the ranks of a real transfer do. Imports torch and nothing heavier, for four processes pay for it."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf.dist.groups import GroupFactory
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Topology
from rlhf.reshard.weight_sync import WeightSync


def params_of(layout: ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    """Memory as large as the layout says."""
    shapes: dict[str, list[int]] = {}
    for piece in layout.holdings(rank) if rank in layout.ranks else ():
        stops = [stop for _, stop in piece.param_box(piece.box).spans]
        shapes[piece.param] = [max(a, b) for a, b in zip(shapes.get(piece.param, stops), stops, strict=True)]
    return {name: torch.zeros(shape, dtype=getattr(torch, layout.dtype)) for name, shape in shapes.items()}


def sync_all(pairs: list[tuple[ModelLayout, ModelLayout]], folder: Path) -> None:
    factory, found = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60)), []
    for src, dst in pairs:
        group = factory.cpu_group([tuple(sorted({*src.ranks, *dst.ranks}))])
        sync = WeightSync(src, dst, topology=Topology.blocks(4, ranks_per_node=2), group=group, bucket_bytes=4096)
        found.append(sync.update_weights(params_of(src, dist.get_rank()), params_of(dst, dist.get_rank())))
    if dist.get_rank() == 0:
        torch.save([(stats.received, stats.bound) for stats in found], folder / "stats")
