"""Weights at rest into parameters and through sinks, against the store's own tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.errors import LayoutError, WeightSyncError
from rlhf.families.spec import ModelSpec
from rlhf.reshard.from_store import fill
from rlhf.reshard.layout import Box, ModelLayout
from rlhf.rollout.native.layout import native_layout
from rlhf.rollout.sglang.layout import Sizes, padding_elements, sglang_layout
from rlhf.rollout.sglang.weights.sink import SchedulerSink, check_models
from tests.reshard.toy import full_tensors
from tests.rollout.schedulers import ThreadPort, model_of
from tests.rollout.sglang.test_layout import SPECS
from tests.rollout.sglang.weights.test_loader import check_holds

CPU = torch.device("cpu")


def reader(full: dict[str, Tensor], asked: list[int] | None = None) -> Callable[[str, Box], Tensor]:
    def read(tensor: str, box: Box) -> Tensor:
        if asked is not None:
            asked.append(box.num_elements)
        return full[tensor][box.slices].clone()

    return read


def empty_params(layout: ModelLayout, rank: int) -> dict[str, Tensor]:
    ends: dict[str, list[int]] = {}
    for piece in layout.holdings(rank):
        stops = [stop for _, stop in piece.param_box(piece.box).spans]
        found = ends.setdefault(piece.param, stops)
        ends[piece.param] = [max(pair) for pair in zip(found, stops, strict=True)]
    return {name: torch.full(shape, torch.nan) for name, shape in ends.items()}


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])  # the second ties its embedding
def test_each_rank_reads_its_own_shard_once(name: str) -> None:
    layout = native_layout(SPECS[name], tp=2, dp=1, first_rank=0, dtype="float32")
    full = full_tensors(layout.tensors)
    for rank in (0, 1):
        params, asked = empty_params(layout, rank), list[int]()
        fill(layout, {rank: params}, reader(full, asked))
        for piece in layout.holdings(rank):
            assert torch.equal(
                params[piece.param][piece.param_box(piece.box).slices], full[piece.tensor][piece.box.slices]
            )
        distinct = {(piece.tensor, piece.box) for piece in layout.holdings(rank)}
        assert sum(asked) == sum(box.num_elements for _, box in distinct)


def sinks_of(spec: ModelSpec, sizes: Sizes, port: ThreadPort) -> tuple[SchedulerSink, ...]:
    """Of one process that speaks for all tp ranks, as SGLangEngine makes them."""

    def sink(tp_rank: int, others: tuple[SchedulerSink, ...] = ()) -> SchedulerSink:
        leads = port if tp_rank == 0 else None
        return SchedulerSink(
            spec,
            sizes,
            tp_rank=tp_rank,
            dtype="float32",
            port=leads,
            cpu_group=None,
            device=CPU,
            limit_s=9,
            others=others,
        )

    others = tuple(sink(tp_rank) for tp_rank in range(1, sizes.tp))
    return (sink(0, others), *others)


@pytest.mark.parametrize(
    ("name", "sizes"), [("qwen3", Sizes(2, 1)), ("qwen3_moe", Sizes(2, 2)), ("qwen2", Sizes(1, 1))]
)
def test_one_process_fills_all_schedulers_of_an_engine_through_small_windows(name: str, sizes: Sizes) -> None:
    spec, window_bytes = SPECS[name], 6000
    layout = sglang_layout(spec, tp=sizes.tp, ep=sizes.ep, dp=1, first_rank=0, dtype="float32")
    full = full_tensors(layout.tensors)
    port = ThreadPort(*(model_of(spec, sizes) for _ in range(sizes.tp)))
    sinks = sinks_of(spec, sizes, port)
    try:
        check_models(sinks)
        for scale in (1.0, 2.0):  # again, into the same engine
            given, asked = {tensor: data * scale for tensor, data in full.items()}, list[int]()
            fill(layout, dict(enumerate(sinks)), reader(given, asked), window_bytes=window_bytes)
            assert max(asked) * 4 <= window_bytes / 8
            for rank, model in enumerate(port.models):
                padding = sum(padding_elements(spec, sizes, rank).values())
                check_holds(model, layout.holdings(rank), given, padding)
    finally:
        for sink in sinks:
            sink.close()


def test_a_block_of_another_dtype_is_refused_by_name() -> None:
    layout = native_layout(SPECS["qwen3"], tp=1, dp=1, first_rank=0, dtype="float32")
    full = full_tensors(layout.tensors)
    with pytest.raises(LayoutError, match=r"comes as torch\.float64; needs torch\.float32"):
        fill(layout, {0: empty_params(layout, 0)}, lambda tensor, box: full[tensor][box.slices].double())


def test_what_does_not_arrive_is_named_by_tensor() -> None:
    """A store whose memory changes once it has been summed: what lands is not what was given."""
    layout = native_layout(SPECS["qwen3"], tp=1, dp=1, first_rank=0, dtype="float32")
    full = full_tensors(layout.tensors)
    lost = "model.layers.1.mlp.down_proj.weight"

    def read(tensor: str, box: Box) -> Tensor:
        return full[tensor][box.slices].clone().as_subclass(_Forgets) if tensor == lost else full[tensor][box.slices]

    with pytest.raises(WeightSyncError, match=rf"rank 0 does not hold the {lost} that it was given"):
        fill(layout, {0: empty_params(layout, 0)}, read)


class _Forgets(torch.Tensor):
    """Its elements change between the sum and the copy."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.copy_:
                target, source = args
                return func(target, source.as_subclass(torch.Tensor) + 1.0)
            return func(*args, **(kwargs or {}))


def test_a_scheduler_that_refuses_leaves_none_waiting() -> None:
    """The second one holds another model: nothing is loaded, and both go back to their work."""
    spec, sizes = SPECS["qwen3"], Sizes(2, 1)
    layout = sglang_layout(spec, tp=2, dp=1, first_rank=0, dtype="float32")
    wrong = model_of(spec, sizes)
    wrong.model.norm.weight = torch.nn.Parameter(torch.full((3,), torch.nan), requires_grad=False)
    port = ThreadPort(wrong, model_of(spec, sizes))
    sinks = sinks_of(spec, sizes, port)
    try:
        with pytest.raises(LayoutError, match=r"tp rank 0.*model\.norm\.weight"):
            check_models(sinks)
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
            fill(layout, dict(enumerate(sinks)), reader(full_tensors(layout.tensors)))
        assert all(param.isnan().all() for param in port.models[1].parameters())
        assert port.num_updates == 2
    finally:
        for sink in sinks:
            sink.close()
