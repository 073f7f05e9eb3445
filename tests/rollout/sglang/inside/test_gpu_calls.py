"""What is asked of SGLang and of CUDA on GPUs, which no test here has: the calls and their order, on stand-ins."""

import asyncio
import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.rollout import RolloutConfig
from rlhf.config.sglang import SGLangConfig
from rlhf.errors import EngineError
from rlhf.reshard.windows import NUM_REGIONS
from rlhf.rollout.sglang.inside.entries import run_scheduler
from rlhf.rollout.sglang.inside.host import Host, check_resolved, start_engine
from rlhf.rollout.sglang.multi_host.nodes import Node, Nodes
from rlhf.rollout.sglang.server_args import Place, server_args
from rlhf.rollout.sglang.team import Team
from rlhf.rollout.sglang.weights import regions
from rlhf.rollout.sglang.wire import Order
from tests.rollout.sglang.inside.gpu_standins import CudaTorch, Recorder, recording_sglang
from tests.rollout.sglang.test_server_args import SPEC


def order_of(**options: object) -> Order:
    config = RolloutConfig(engine="sglang", tp=2, kv_cache_tokens=512, sglang=SGLangConfig(**options))
    place = Place("cuda", 4, 2, "bfloat16")
    args = server_args(SPEC, config, place=place, model_folder=Path("/x"), run_seed=3)
    return Order(parent=os.getpid(), server_args=args, cpu=False, by_seed=True, decode=b"packed")


def test_the_engine_gets_the_gpus_arguments_and_no_stand_ins_for_kernels() -> None:
    record, finders = Recorder(), list(sys.meta_path)
    with recording_sglang(record):
        engine = start_engine(order_of(attention_backend="fa3", deterministic=True, mem_fraction_static=0.5))
        check_resolved(engine)
    assert sys.meta_path == finders
    ((name, args),) = record.calls
    assert name == "Engine"
    wanted = {
        "device": "cuda",
        "dtype": "bfloat16",
        "tp_size": 2,
        "base_gpu_id": 4,
        "gpu_id_step": 2,
        "mem_fraction_static": 0.5,
        "enable_memory_saver": True,
        "disable_cuda_graph": False,
        "enable_deterministic_inference": True,
        "attention_backend": "fa3",
        "sampling_backend": "pytorch",
        "load_format": "dummy",
    }
    assert {key: args[key] for key in wanted} == wanted
    assert engine.detokenizers == ([], [])  # nothing would ever reach one
    scheduler = engine.entry
    assert not scheduler.cpu
    assert scheduler.parent == os.getpid()
    assert scheduler.run.func is run_scheduler
    assert scheduler.run.args == (True, b"packed")  # our sampler; what stop strings read
    assert pickle.dumps(scheduler.run)


@pytest.mark.parametrize("chosen", [{"quantization": "fp8"}, {"moe_runner_backend": "flashinfer_trtllm"}])
def test_what_sglang_chose_by_itself_and_would_repack_weights_is_refused(chosen: dict[str, str]) -> None:
    record = Recorder()
    with recording_sglang(record, chosen=chosen), pytest.raises(ValueError, match=f"{next(iter(chosen.values()))}"):
        check_resolved(start_engine(order_of()))


def test_memory_is_given_back_by_tags_when_idle_and_weights_come_before_keys_and_values() -> None:
    record = Recorder()
    with recording_sglang(record):
        engine = start_engine(order_of())
        host = Host(engine, SimpleNamespace(send=lambda message: None), tp_size=2, cpu=False)

        async def phases() -> None:
            await host._verbs["release_memory"](("kv_cache", "weights"))
            await host._verbs["retake_memory"](("weights",))
            await host._verbs["begin_update"]()
            await host._verbs["end_update"]("4")
            await host._verbs["retake_memory"](("kv_cache",))

        asyncio.run(phases())
    told = [
        call for call in record.calls if "memory" in call[0] or "begin_weight" in call[0] or "end_weight" in call[0]
    ]
    assert told == [
        ("release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        ("resume_memory_occupation", {"tags": ["weights"]}),
        ("begin_weight_update", {"selector": "target"}),
        ("end_weight_update", {}),
        ("resume_memory_occupation", {"tags": ["kv_cache"]}),
    ]
    assert record.names.index("flush_cache") < record.names.index("release_memory_occupation")
    updating = record.names[record.names.index("begin_weight_update") :]
    assert ("pause_generation", {"mode": "retract"}) in record.calls
    order = ("begin_weight_update", "end_weight_update", "flush_cache", "update_weight_version", "continue_generation")
    assert [name for name in updating if name in order] == list(order)
    assert ("update_weight_version", {"new_version": "4"}) in record.calls


def test_windows_on_a_gpu_are_opened_by_handle_on_the_gpu_that_both_see(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder()
    cuda = CudaTorch(record)
    monkeypatch.setattr(regions, "torch", cuda)
    made = regions.make_regions(10, "float32", SimpleNamespace(type="cuda", index=1, __str__=lambda self: "cuda:1"))
    assert made.fd is None
    told = json.loads(json.dumps(made.told()))  # as it travels
    assert (told["kind"], told["uuid"]) == ("device", "GPU-b")
    opened = regions.attach(told, None)
    for at, (mine, theirs) in enumerate(zip(made.tensors, opened, strict=True)):
        mine.fill_(at + 0.5)
        assert torch.equal(theirs, torch.full((10,), at + 0.5))
    (call,) = [told for name, told in record.calls if name == "open"]
    assert call == (1, bytes([7, 0, 255, 0]), NUM_REGIONS * 40, (512, b"\x00counter", 3, b"event", True))
    assert "synchronize" not in record.names
    made.settle()
    assert record.names[-1] == "synchronize"


def test_a_gpu_that_the_scheduler_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "torch", CudaTorch(Recorder(), uuids=("GPU-c",)))
    told = {"kind": "device", "elements": 4, "dtype": "float32", "uuid": "GPU-b", "storage": []}
    with pytest.raises(EngineError, match="GPU GPU-b of the rank is not visible to its scheduler"):
        regions.attach(told, None)


def test_an_engine_of_one_rank_takes_that_ranks_gpu() -> None:
    assert Team(None).nodes(torch.device("cuda", 5), "here") == Nodes((Node("here", 5, 1),), 1)
