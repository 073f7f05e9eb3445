"""One plan, many transfers: between optimizer steps and offloads, complete or only what changed, or none."""

from dataclasses import replace

import pytest
import torch

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard import bucket
from rlhf.reshard.bucket import buckets_of, messages_of
from rlhf.reshard.execute import LocalParams, Params, execute
from rlhf.reshard.plan import make_plan
from rlhf.reshard.staging import Staging
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import Parcel
from rlhf.rollout.native.layout import native_layout
from tests.harness.ranks import run_ranks
from tests.reshard.gloo import as_table
from tests.reshard.standing import claims, standing
from tests.reshard.test_dense_models import SPECS
from tests.reshard.toy import Toy, empty_params, engine, filled_params, full_tensors, source


@pytest.mark.dist
def test_eight_ranks_from_tp4_pp2_to_four_engines_of_two_and_back_to_tp2_pp4():
    spec = replace(SPECS["qwen2"], num_layers=5)
    there = megatron_layout(spec, ParallelConfig(tp=4, pp=2, layers_per_stage=(3, 2)), head=Head.LM, dtype="float32")
    engines = native_layout(spec, tp=2, dp=4, first_rank=0, dtype="float32")
    back = megatron_layout(
        spec, ParallelConfig(tp=2, pp=4, layers_per_stage=(1, 2, 1, 1)), head=Head.LM, dtype="float32"
    )
    run_ranks(8, standing, 8, *map(as_table, (there, engines, back)))


TOY = Toy(vocab=290, hidden=16, heads=8, kv_heads=4, head_dim=2, ffn=48, layers=3)


@pytest.mark.dist
def test_ranks_outside_take_no_part_buckets_overlap_and_memory_is_bounded():
    src, dst = source(TOY, tp=2, stages=(3,), dp=1), engine(TOY, tp=1, dp=1, first_rank=2)
    run_ranks(4, claims, 4, as_table(src), as_table(dst), (3,))


class RecordingTransport:
    """Takes note of the memory that it is handed."""

    def __init__(self) -> None:
        self.received: list[Parcel] = []
        self.sent: list[Parcel] = []

    def post(self, receives, sends):
        self.received += receives
        self.sent += list(sends)
        return self

    def wait(self) -> None:
        """Nothing is on its way."""


def test_contiguous_blocks_are_sent_from_and_received_into_the_parameters_themselves(monkeypatch):
    monkeypatch.setattr(bucket, "ALONE_BYTES", 256)
    src, dst = source(TOY, tp=2, stages=(3,), dp=1), engine(TOY, tp=1, dp=1, first_rank=2)
    plan, full = make_plan(src, dst, Topology.blocks(3, ranks_per_node=3)), full_tensors(src.tensors)
    for rank, side, packed in ((0, "sent", ()), (2, "received", ("o", "down"))):
        part = plan.of(rank)
        params = filled_params(src, rank, full) if rank == 0 else empty_params(dst, rank, fill=0.0)
        places = LocalParams(plan.src_index if rank == 0 else plan.dst_index, rank, params, side=side)
        none = LocalParams(plan.dst_index if rank == 0 else plan.src_index, rank, {}, side=side)
        from_, into = (places, none) if rank == 0 else (none, places)
        messages = messages_of(plan, part, 1 << 20)
        transport, staging, cpu = RecordingTransport(), Staging("float32"), torch.device("cpu")
        execute(
            buckets_of(*messages, 1 << 18),
            src=from_,
            dst=Params(part, from_, into, cpu),
            transport=transport,
            staging=staging,
            device=cpu,
        )
        storages = {param.untyped_storage().data_ptr() for param in params.values()}
        staged = 0
        for message, parcel in zip(messages[1 if rank == 0 else 0], getattr(transport, side), strict=True):
            move = message.moves[0]
            strided = len(message.moves) > 1 or move.tensor.split(".")[-1] in packed
            assert (parcel.data.untyped_storage().data_ptr() in storages) is not strided, message
            if not strided:
                assert parcel.data.data_ptr() == places.view(move.tensor, move.box).data_ptr()
            staged += parcel.data.nbytes if strided else 0
        assert staging.used_bytes == staging.num_bytes == staged
        assert any(len(message.moves) == 1 for message in messages[1 if rank == 0 else 0])
