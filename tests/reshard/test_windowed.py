"""Blocks on their way through windows, ranks as threads of one process: what lands, and when a region is reused."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlhf.reshard.bucket import buckets_of
from rlhf.reshard.execute import LocalParams, execute
from rlhf.reshard.layout import Box, ModelLayout
from rlhf.reshard.plan import Plan, make_plan
from rlhf.reshard.staging import Staging
from rlhf.reshard.topology import Fanout, Link, Topology
from rlhf.reshard.transport import MemoryHub, MemoryTransport, Parcel, Pending
from rlhf.reshard.windowed import Windowed
from rlhf.reshard.windows import NUM_REGIONS, Window, Windows
from tests.reshard.toy import Toy, brute_force_far, elements, engine, filled_params, source

TOY = Toy(vocab=37, hidden=24, heads=12, kv_heads=6, head_dim=4, ffn=30, layers=5)
SMALL = Toy(vocab=13, hidden=5, heads=12, kv_heads=6, head_dim=2, ffn=18, layers=5)
"""For windows of a few rows, of which there are many."""


def layouts_of(toy: Toy) -> dict[str, tuple[ModelLayout, ModelLayout, Topology]]:
    return {
        "two engines on a node of their own": (
            source(toy, tp=2, stages=(1, 4), dp=2),
            engine(toy, tp=2, dp=2, first_rank=8),
            Topology((0,) * 4 + (1,) * 4 + (2,) * 4),
        ),
        "engines on the actor's nodes and on another": (
            source(toy, tp=2, stages=(2, 3), dp=1),
            engine(toy, tp=3, dp=3, first_rank=1),
            Topology((0,) * 2 + (1,) * 3 + (2,) * 5),
        ),
    }


LAYOUTS, SMALL_LAYOUTS = layouts_of(TOY), layouts_of(SMALL)


class LateTransport:
    """Reads what is sent as late as a backend may: in the end of its own wait; what is stable, in the receiver's."""

    def __init__(self, hub: MemoryHub, rank: int) -> None:
        self._hub, self._inner = hub, hub.transport(rank)
        self.traffic = self._inner.traffic

    def post(self, receives: Sequence[Parcel], sends: Iterable[Parcel]) -> Pending:
        return _Late(self._hub, self._inner, receives, list(sends))


@dataclass
class _Late:
    hub: MemoryHub
    transport: MemoryTransport
    receives: Sequence[Parcel]
    sends: Sequence[Parcel]

    def wait(self) -> None:
        traffic = self.transport.traffic
        for parcel in self.sends:
            self.hub.boxes[traffic.rank, parcel.peer].put(parcel.data if parcel.stable else parcel.data.clone())
            traffic.count_sent(parcel)
        self.transport.post(self.receives, ()).wait()


class Sink:
    """Loads a window when the next one is asked for its region, and spoils the region before it is used again."""

    needs_complete = True
    is_lost = False

    def __init__(self, windows: Sequence[Window], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        size = max((window.num_elements for window in windows), default=0)
        self._windows = windows
        self._regions = [torch.full((size,), torch.nan) for _ in range(NUM_REGIONS)]
        self.landed: dict[tuple[str, int], float] = {}
        self.is_finished = False

    def region(self, number: int) -> Tensor:
        return self._regions[number % NUM_REGIONS].fill_(torch.nan)

    def hand_over(self, number: int) -> None:
        for piece in self._windows[number].pieces:
            move = piece.move
            flat = self._regions[number % NUM_REGIONS][piece.at : piece.at + move.box.num_elements]
            for at, value in zip(_numbers(self._shapes[move.tensor], move.box), flat.tolist(), strict=True):
                assert (move.tensor, at) not in self.landed
                self.landed[move.tensor, at] = value

    def finish(self) -> None:
        self.is_finished = True


def _numbers(shape: tuple[int, ...], box: Box) -> list[int]:
    return torch.arange(torch.Size(shape).numel()).view(shape)[box.slices].flatten().tolist()


def _run(plan: Plan, rank: int, hub: MemoryHub, window_bytes: int) -> tuple[Sink, dict[Link, int]]:
    part, windows, transport = plan.of(rank), Windows(plan, window_bytes), LateTransport(hub, rank)
    receives, sends = windows.messages(part)
    buckets = buckets_of(receives, sends, windows.max_elements, windowed=True)
    mine = windows.of(rank) if rank in plan.dst.ranks else ()
    sink, cpu = Sink(mine, plan.dst.tensors), torch.device("cpu")
    full = {name: torch.arange(torch.Size(shape).numel()).view(shape) for name, shape in plan.src.tensors.items()}
    params = filled_params(plan.src, rank, {name: ids.float() for name, ids in full.items()})
    src = LocalParams(plan.src_index, rank, params, side="source")
    staging = Staging(plan.src.dtype)
    into = Windowed(mine, receives, sends, src, sink)
    execute(buckets, src=src, dst=into, transport=transport, staging=staging, device=cpu)
    return sink, transport.traffic.received


@pytest.mark.parametrize("window_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("fanout", Fanout)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_lands_once_and_what_is_passed_on_is_read_before_its_region_is_used_again(
    name, fanout, window_bytes
):
    src, dst, topology = (SMALL_LAYOUTS if window_bytes == 64 else LAYOUTS)[name]
    plan, hub = make_plan(src, dst, topology, fanout=fanout), MemoryHub(topology)
    with ThreadPoolExecutor(len(plan.ranks)) as pool:
        running = {rank: pool.submit(_run, plan, rank, hub, window_bytes) for rank in plan.ranks}
        found = {rank: future.result() for rank, future in running.items()}
    for rank in dst.ranks:
        sink, _ = found[rank]
        assert sink.is_finished
        assert sorted(sink.landed) == sorted(set(elements(dst, rank)))
        assert all(value == number for (_, number), value in sink.landed.items())
    far = sum(received[Link.ACROSS_NODES] for _, received in found.values())
    assert far == 4 * brute_force_far(src, dst, topology.nodes, once=fanout is Fanout.NODE)
