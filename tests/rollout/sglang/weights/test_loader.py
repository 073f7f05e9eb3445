"""Weights through windows into parameters of another owner: ranks are threads, schedulers modules without SGLang."""

import errno
import gc
import os
import sys
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.errors import EngineError, LayoutError, WeightSyncError
from rlhf.families.spec import ModelSpec
from rlhf.reshard.checksum import checksum
from rlhf.reshard.endpoint import Endpoint, endpoint
from rlhf.reshard.execute import LocalParams, execute
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.plan import Plan, make_plan
from rlhf.reshard.routes import Routes
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import MemoryHub
from rlhf.reshard.windows import Manifest
from rlhf.rollout.sglang.layout import Sizes, padding_elements, sglang_layout
from rlhf.rollout.sglang.weights import regions
from rlhf.rollout.sglang.weights.channel import Door, knock
from rlhf.rollout.sglang.weights.loader import _Transfer as Transfer
from rlhf.rollout.sglang.weights.loader import own_params
from rlhf.rollout.sglang.weights.sink import SchedulerSink
from tests.reshard.toy import filled_params, full_tensors
from tests.rollout.schedulers import ThreadPort, model_of
from tests.rollout.sglang.test_layout import SPECS

CPU = torch.device("cpu")
CASES = [("qwen3", Sizes(2)), ("llama", Sizes(4)), ("qwen3_moe", Sizes(2, 2)), ("mixtral", Sizes(4, 2))]


def staged(spec: ModelSpec) -> ModelLayout:
    """A source of two stages of two tensor-parallel ranks; a tied embedding is held by both stages."""
    whole = sglang_layout(spec, tp=2, dp=1, first_rank=0, dtype="float32")

    @cache
    def holdings(rank: int) -> tuple[ParamLayout, ...]:
        stage = rank // 2
        last = ("model.norm", "lm_head")
        return tuple(
            one
            for one in whole.holdings(rank % 2)
            if (f"layers.{stage}." in one.tensor)
            or ("layers" not in one.tensor and one.tensor.startswith(last) == bool(stage))
        )

    return replace(whole, ranks=(0, 1, 2, 3), holdings=holdings)


class Engine:
    """One engine's ranks and its schedulers' models."""

    def __init__(self, spec: ModelSpec, sizes: Sizes, ranks: tuple[int, ...]) -> None:
        self.models = {rank: model_of(spec, sizes) for rank in ranks}
        self.ports = {rank: ThreadPort(model) for rank, model in self.models.items()}
        self.sinks = {
            rank: SchedulerSink(
                spec, sizes, tp_rank=at, dtype="float32", port=self.ports[rank], cpu_group=None, device=CPU, limit_s=9
            )
            for at, rank in enumerate(ranks)
        }


def transfer(
    plan: Plan, params: dict, engine: Engine, *, bucket_bytes: int, tensors: Collection[str] | None = None
) -> dict[int, dict[str, int]]:
    """Run every rank's part as a thread; returns the sums of each destination."""
    hub = MemoryHub(plan.topology)

    def run(rank: int) -> dict[str, int]:
        routes, transport = Routes(plan, rank, bucket_bytes, windowed=True), hub.transport(rank)
        route = routes.route(None if tensors is None else frozenset(tensors))
        src = LocalParams(plan.src_index, rank, params[rank], side="source")
        into: Endpoint = endpoint(routes, rank, engine.sinks.get(rank, {}))
        try:
            into.begin(route)
            execute(
                route.buckets,
                src=src,
                dst=into.into(route, src, CPU),
                transport=transport,
                staging=routes.staging,
                device=CPU,
            )
            places = [
                (tensor, Box(tuple((0, extent) for extent in plan.dst.tensors[tensor])))
                for tensor in plan.dst_index.of_rank(rank)
            ]
            sums = dict(zip((tensor for tensor, _ in places), into.sums(places, brief=False), strict=True))
        finally:
            into.end()
        assert routes.staging.num_bytes + route.region_bytes <= route.staging_bytes <= 2 * max(bucket_bytes, 8)
        return dict(sums)

    with ThreadPoolExecutor(len(plan.ranks)) as pool:
        running = {rank: pool.submit(run, rank) for rank in plan.ranks}
        return {rank: future.result() for rank, future in running.items()}


def check_holds(model: torch.nn.Module, held: tuple[ParamLayout, ...], full: dict, num_padding: int) -> None:
    """Every block of the model's parameters is that of the full tensors, and nothing else was written."""
    params = {
        name: param.view(-1, param.shape[-1]) if param.dim() > 2 else param for name, param in model.named_parameters()
    }
    filled = 0
    for one in held:
        place = params[one.param][one.param_box(one.box).slices]
        assert torch.equal(place, full[one.tensor][one.box.slices]), one
        filled += one.box.num_elements
    assert sum(int(param.isnan().sum()) for param in params.values()) == num_padding
    assert filled + num_padding == sum(param.numel() for param in params.values())


@pytest.mark.parametrize("bucket_bytes", [6000, 1 << 20])
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_each_scheduler_gets_its_shard_and_sums_it(name, sizes, bucket_bytes):
    spec = SPECS[name]
    first = 2 if name == "qwen3" else 4  # beside the actor's last stage, or in a pool of its own
    src = staged(spec)
    dst = sglang_layout(spec, tp=sizes.tp, ep=sizes.ep, dp=1, first_rank=first, dtype="float32")
    plan = make_plan(src, dst, Topology.blocks(8, ranks_per_node=4))
    engine = Engine(spec, sizes, dst.ranks)
    for sink in engine.sinks.values():
        sink.check_model()
        assert sink.needs_complete
    full = full_tensors(src.tensors)
    changed = [tensor for tensor in src.tensors if "norm" in tensor or ".v_proj" in tensor]
    for tensors in (None, changed, (), None):
        for tensor in src.tensors if tensors is None else tensors:
            full[tensor] = full[tensor] * -2 + 1
        params = {rank: filled_params(src, rank, full) for rank in plan.ranks}
        sums = transfer(plan, params, engine, bucket_bytes=bucket_bytes, tensors=tensors)
        for at, rank in enumerate(dst.ranks):
            padding = sum(padding_elements(spec, sizes, at).values())
            check_holds(engine.models[rank], dst.holdings(rank), full, padding)
            once = {(one.tensor, one.box) for one in dst.holdings(rank)}  # a head of its own is the embedding again
            assert sums[rank] == {tensor: int(checksum(tensor, box, full[tensor][box.slices])) for tensor, box in once}
            assert not engine.sinks[rank].needs_complete
    assert all(port.num_updates == 5 for port in engine.ports.values())


def one_engine() -> tuple[Plan, Engine, Manifest, dict]:
    """A source and an engine of one rank each, apart."""
    spec = SPECS["qwen3"]
    src = sglang_layout(spec, tp=1, dp=1, first_rank=0, dtype="float32")
    dst = sglang_layout(spec, tp=1, dp=1, first_rank=1, dtype="float32")
    plan = make_plan(src, dst, Topology.blocks(2, ranks_per_node=2))
    manifest = Routes(plan, 1, 2000, windowed=True).route().manifest
    assert manifest is not None
    full = full_tensors(src.tensors)
    return plan, Engine(spec, Sizes(1), (1,)), manifest, {0: filled_params(src, 0, full), 1: {}}


def serve(sink: SchedulerSink, manifest: Manifest, *, skip: int = -1, dtype: str = "float32") -> None:
    """A transfer without sources."""
    try:
        sink.begin(manifest, dtype)
        for window in manifest.windows:
            sink.region(window.number).zero_()
            if window.number != skip:
                sink.hand_over(window.number)
        sink.finish()
    finally:
        sink.end()


def test_each_tensor_left_out_is_noticed():
    _, engine, manifest, _ = one_engine()
    sink = engine.sinks[1]
    tensors = {one.tensor for one in manifest.held}
    assert len(tensors) == 24
    for tensor in tensors:
        short = replace(
            manifest,
            windows=tuple(
                replace(window, pieces=tuple(piece for piece in window.pieces if piece.move.tensor != tensor))
                for window in manifest.windows
            ),
        )
        with pytest.raises(WeightSyncError, match=rf"elements of {tensor}, held in .*, do not come"):
            serve(sink, short)
        assert sink.needs_complete
    serve(sink, manifest)
    assert not sink.needs_complete
    assert not any(param[: SPECS["qwen3"].head_dim].any() for param in engine.models[1].parameters())


def test_what_does_not_fit_the_model_is_refused_before_a_byte_moves():
    plan, engine, manifest, _ = one_engine()
    sink, model = engine.sinks[1], engine.models[1]
    norm, qkv = "model.norm.weight", "model.layers.0.self_attn.qkv_proj.weight"

    def refuses(
        named: str, manifest: Manifest = manifest, dtype: str = "float32", kind: type = WeightSyncError
    ) -> None:
        with pytest.raises(kind, match=named):
            serve(sink, manifest, dtype=dtype)
        assert all(param.isnan().all() for param in model.parameters())
        assert sink.needs_complete

    def held_as(old: str, **changes: object) -> Manifest:
        held = tuple(replace(one, **changes) if one.tensor == old else one for one in manifest.held)
        return replace(manifest, held=held)

    refuses(r"the engine has no parameter model\.nrom", held_as(norm, param="model.nrom.weight"))
    k_proj = "model.layers.0.self_attn.k_proj.weight"
    refuses(rf"{qkv} has shape \(128, 44\); needs room for {k_proj}", held_as(k_proj, param_start=(120, 0)))
    refuses("belong to no tensor, or some to two", held_as(k_proj, param_start=(0, 0)))
    refuses("is torch.float32; bfloat16 arrives, and nothing is cast", dtype="bfloat16")
    refuses("does not hold", replace(manifest, held=manifest.held[1:]))
    routes = Routes(plan, 1, 2000, windowed=True)
    refuses("needs a complete transfer first", routes.route(frozenset([norm])).manifest)
    model.model.add_module("extra", torch.nn.LayerNorm(3))
    torch.nn.init.constant_(model.model.extra.weight, torch.nan)
    torch.nn.init.constant_(model.model.extra.bias, torch.nan)
    refuses(r"3 elements of the engine's model\.extra\.weight \(3,\) belong to no tensor")
    with pytest.raises(LayoutError, match=r"the engine has a parameter model\.extra\.weight of shape \(3,\)"):
        sink.check_model()
    del model.model.extra
    model.model.norm.use_intel_amx_backend = True
    refuses("model.norm keeps its weights repacked")
    model.model.norm.use_intel_amx_backend = False
    serve(sink, manifest)


def test_weights_that_are_kept_in_another_order_are_refused(monkeypatch):
    _, engine, manifest, _ = one_engine()
    module = engine.models[1].model.layers
    monkeypatch.setitem(sys.modules, "sglang_on_aiter", SimpleNamespace(_use_aiter=True))
    plain = "UnquantizedLinearMethod"  # SGLang's own name begins so; what it does is told by flags
    for name, value, named in (
        ("w13_swiglu_interleaved", True, "w13_swiglu_interleaved"),
        ("quant_method", type(plain, (), {"use_intel_amx_backend": True})(), "use_intel_amx_backend"),
        ("quant_method", type(plain, (), {"use_triton_kernels": True})(), "use_triton_kernels"),
        ("quant_method", type(plain, (), {"__module__": "sglang_on_aiter"})(), "aiter"),
        ("quant_method", type("Fp8LinearMethod", (), {})(), "Fp8LinearMethod"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value, raising=False)
            with pytest.raises(WeightSyncError, match=rf"model\.layers keeps its weights repacked \({named}\)"):
                serve(engine.sinks[1], manifest)
    module.quant_method = type(plain, (), {})()
    serve(engine.sinks[1], manifest)


def test_experts_that_do_not_lie_block_by_block_are_refused():
    model = torch.nn.Module()
    model.w13_weight = torch.nn.Parameter(torch.zeros(3, 8, 5).transpose(1, 2))
    with pytest.raises(WeightSyncError, match=r"w13_weight \(3, 5, 8\) has strides .*; needs a contiguous block"):
        own_params(model)


def test_a_window_that_comes_twice_is_refused():
    _, engine, manifest, _ = one_engine()
    sink = engine.sinks[1]
    try:
        sink.begin(manifest, "float32")
        sink.region(0).zero_()
        sink.hand_over(0)
        sink.hand_over(0)
        with pytest.raises(WeightSyncError, match=r"window 0 of .* came twice or is unknown"):
            sink.finish()
    finally:
        sink.end()


def test_a_model_that_changed_since_the_last_transfer_is_looked_at_again():
    _, engine, manifest, _ = one_engine()
    serve(engine.sinks[1], manifest)
    norm = engine.models[1].model.norm
    norm.weight = torch.nn.Parameter(norm.weight.double(), requires_grad=False)
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight is torch.float64; float32 arrives"):
        serve(engine.sinks[1], manifest)


def test_a_complete_transfer_that_is_broken_off_leaves_an_engine_that_takes_no_part_of_one():
    plan, engine, manifest, _ = one_engine()
    sink = engine.sinks[1]
    serve(sink, manifest)
    try:
        sink.begin(manifest, "float32")
        sink.region(0).zero_()
        sink.hand_over(0)  # and then another rank of the job failed
    finally:
        sink.end()
    assert sink.needs_complete
    part = Routes(plan, 1, 2000, windowed=True).route(frozenset(["model.norm.weight"])).manifest
    with pytest.raises(WeightSyncError, match="needs a complete transfer first"):
        serve(sink, part)


def test_a_window_that_is_not_handed_over_is_noticed_and_the_engine_must_be_filled_again():
    plan, engine, manifest, params = one_engine()
    sink = engine.sinks[1]
    assert len(manifest.windows) > 4
    serve(sink, manifest)
    with pytest.raises(WeightSyncError, match=r"windows \[2\] not loaded"):
        serve(sink, manifest, skip=2)
    assert sink.needs_complete
    norm = frozenset(["model.norm.weight"])
    part = Routes(plan, 1, 2000, windowed=True).route(norm).manifest
    with pytest.raises(WeightSyncError, match="needs a complete transfer first"):
        serve(sink, part)
    transfer(plan, params, engine, bucket_bytes=2000)
    transfer(plan, params, engine, bucket_bytes=2000, tensors=norm)
    sink.forget()  # memory was released: the scheduler's own state says that it holds everything
    assert sink.needs_complete
    with pytest.raises(WeightSyncError, match="needs a complete transfer first"):
        serve(sink, part)


def test_steps_after_a_load_run_once_a_transfer():
    _, engine, manifest, _ = one_engine()
    calls = []
    engine.models[1].post_load_weights = lambda: calls.append(1)
    for number in (1, 2, 3):
        serve(engine.sinks[1], manifest)
        assert len(calls) == number


def test_an_end_that_dies_is_told_at_once():
    _, engine, manifest, _ = one_engine()
    sink = engine.sinks[1]
    serve(sink, manifest)
    engine.models[1].rlhf_loading._channel.close()
    with pytest.raises(EngineError, match="the scheduler of tp rank 0 is gone"):
        sink._ask({"do": "describe"})
    door = Door()
    inside = knock(door.name, peer="the rank")
    outside = door.open(peer="the scheduler", limit_s=5, while_waiting=lambda: None)
    outside.close()
    with pytest.raises(EngineError, match="the rank is gone"):
        inside.receive()
    door.close()
    with pytest.raises(EngineError, match="the rank is gone"):
        knock(door.name, peer="the rank")


def test_a_scheduler_that_hangs_is_named_and_not_waited_for_twice(monkeypatch):
    _, engine, manifest, _ = one_engine()
    sink, goes_on = engine.sinks[1], threading.Event()
    serve(sink, manifest)
    load = Transfer.load
    monkeypatch.setattr(Transfer, "load", lambda *args: goes_on.wait(20) and load(*args))
    sink._reply_limit_s = 0.5
    try:
        with pytest.raises(EngineError, match=r"the scheduler of tp rank 0 has not answered for 0\.5 s, so it hangs"):
            serve(sink, manifest)
        assert not goes_on.is_set()
    finally:
        goes_on.set()


def test_regions_are_in_no_folder_and_a_shortage_is_told_in_advance(monkeypatch):
    def mapped() -> int:
        return sum("/memfd:rlhf_windows" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    made = regions.HostRegions(1000, "bfloat16")
    there = regions.attach(made.told(), made.fd)
    made.tensors[1][999] = 3.0
    assert there[1][999] == 3.0
    assert there[0].dtype is torch.bfloat16
    assert mapped() == before + 2

    def refuse(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    closed: list[int] = []
    close = os.close
    with monkeypatch.context() as patch:  # memory is reserved at once: else a shortage would end the process later
        patch.setattr("os.posix_fallocate", refuse)
        patch.setattr("os.close", lambda fd: (closed.append(fd), close(fd)))
        with pytest.raises(EngineError, match=r"the system refused 0 MiB .*\(No space left on device\)"):
            regions.HostRegions(1000, "bfloat16")
        gc.collect()
    assert len(closed) == 1  # a second time might close what another thread has opened since
    monkeypatch.setattr(regions, "available_bytes", lambda: 5 << 20)
    with pytest.raises(EngineError, match="2 windows need 8 MiB of shared host memory, 5 MiB are free"):
        regions.HostRegions(1 << 20, "float32")
