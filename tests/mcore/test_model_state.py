"""What ranks bring to a checkpoint: each element of weights, moments and masters once, out of the memory in use."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.config.model import ModelConfig, OptimConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.families.frozen import frozen_tensors
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.load import draw_weights
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.model_state import model_blocks, optimizer_blocks, weights_loaded
from rlhf.mcore.optimizer import Optimizer, build_optimizer
from rlhf.mcore.share import boxes_of_range, named_params
from rlhf.mcore.stored import stored_pieces, stored_shapes
from rlhf.reshard.block import Block
from tests.mcore.fake_ranks import as_rank
from tests.mcore.stand_in import tiny_moe_spec, tiny_spec

CPU = torch.device("cpu")
ODD = {"hidden_size": 18, "ffn_size": 28, "vocab_size": 131}  # no size is a multiple of a bucket's or a shard's


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    parallel: ParallelConfig
    head: Head = Head.LM
    dtype: str = "float32"
    overlapped: bool = False
    frozen: tuple[str, ...] = ()


CASES = (
    Case(tiny_spec(**ODD), ParallelConfig(tp=2, pp=2, dp=2)),
    Case(tiny_spec(**ODD, family="qwen3", qk_norm=True, tied_embeddings=True), ParallelConfig(pp=2, dp=3)),
    Case(
        tiny_spec(**ODD, family="qwen2", qkv_bias=True, num_kv_heads=2),
        ParallelConfig(tp=4, dp=2),
        dtype="bfloat16",
        overlapped=True,
    ),
    Case(tiny_spec(**ODD), ParallelConfig(tp=1, pp=2, first_rank=2), Head.VALUE),  # a critic on ranks 2 and 3 alone
    Case(
        tiny_spec(**ODD, num_layers=7, tied_embeddings=True),
        ParallelConfig(tp=2, pp=2, vpp=3, dp=2, layers_per_stage=(1, 1, 2, 1, 1, 1)),
        dtype="bfloat16",
    ),
    Case(
        tiny_spec(**ODD, tied_embeddings=True, num_layers=3),
        ParallelConfig(tp=2, pp=2, dp=2, layers_per_stage=(1, 2)),
        frozen=("model.embed_tokens.weight", "model.layers.0.*", "*.1.mlp.*", "*.2.input_layernorm.weight"),
    ),
    Case(tiny_moe_spec(**ODD), ParallelConfig(tp=2, dp=4, ep=2, etp=2), dtype="bfloat16"),
    Case(
        tiny_moe_spec(**ODD, family="mixtral", qk_norm=False),
        ParallelConfig(pp=2, dp=4, ep=2),
        Head.VALUE,
        frozen=("score.weight", "*.w2.weight", "*.1.block_sparse_moe.gate.weight"),
    ),
)


def same_object_of_all(into: list, found: object, group: dist.ProcessGroup | None = None) -> None:
    """In place of torch's gather: what ranks tell each other while an optimizer is built is the same on all of them."""
    into[:] = [found] * len(into)


def built(case: Case, rank: int) -> Iterator[tuple[MegatronModel, Optimizer]]:
    frozen = frozen_tensors(case.spec, case.frozen, head=case.head, where="freeze") if case.frozen else frozenset()
    with as_rank(case.parallel, rank) as groups:
        model = build_model(
            case.spec,
            ModelConfig(path="-", dtype=case.dtype),
            case.parallel,
            groups,
            head=case.head,
            device=CPU,
            seed=1,
            trainable=True,
            frozen=frozen,
            overlap_grad_reduce=case.overlapped,
            overlap_param_gather=case.overlapped,
        )
        draw_weights(model)
        optim = OptimConfig(
            lr=0.1, overlap_grad_reduce=case.overlapped, overlap_param_gather=case.overlapped, weight_decay=0.1
        )
        yield model, build_optimizer(model, optim)


def add(counts: dict[str, Tensor], blocks: Iterable[Block]) -> None:
    for block in blocks:
        assert block.data.shape == block.box.shape, block.key
        at = counts.setdefault(block.key, torch.zeros(block.shape, dtype=torch.int64))
        assert at.shape == block.shape
        at[block.box.slices] += 1


def trained_elements(case: Case) -> dict[str, Tensor]:
    """1 for each element of a stored tensor that is trained."""
    frozen = frozen_tensors(case.spec, case.frozen, head=case.head, where="freeze") if case.frozen else frozenset()
    trained = {
        name: torch.zeros(shape, dtype=torch.int64) for name, shape in stored_shapes(case.spec, head=case.head).items()
    }
    for piece in stored_pieces(case.spec, head=case.head):
        trained[piece.key][piece.stored_box(piece.box).slices] = piece.tensor not in frozen
    return trained


@pytest.mark.parametrize("number", range(len(CASES)))
def test_ranks_bring_each_element_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[number]
    monkeypatch.setattr(dist, "all_gather_object", same_object_of_all)
    weights: dict[str, Tensor] = {}
    states: dict[str, Tensor] = {}
    for rank in case.parallel.ranks:
        for model, optimizer in built(case, rank):
            blocks = model_blocks(model, own_share=True)
            add(weights, blocks)
            add(states, optimizer_blocks(model, optimizer, own_share=True))
            memory = {param.untyped_storage().data_ptr() for param in named_params(model).values()}
            assert {block.data.untyped_storage().data_ptr() for block in blocks} <= memory, "copied"
            assert all(not block.data.requires_grad for block in blocks)
    shapes = stored_shapes(case.spec, head=case.head)
    assert {key: tuple(count.shape) for key, count in weights.items()} == shapes
    assert all((count == 1).all() for count in weights.values())
    kinds = ("exp_avg", "exp_avg_sq", *(["fp32_param"] if case.dtype == "bfloat16" else []))
    trained = {key: elements for key, elements in trained_elements(case).items() if elements.any()}
    assert set(states) == {f"optimizer.state.{kind}.{key}" for kind in kinds for key in trained}
    for key, elements in trained.items():
        assert all(torch.equal(states[f"optimizer.state.{kind}.{key}"], elements) for kind in kinds), key


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_is_read_fills_all_that_a_rank_holds(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones into every block, into memory that holds NaN elsewhere: then only padding is not one, and it is zero."""
    case = CASES[number]
    monkeypatch.setattr(dist, "all_gather_object", same_object_of_all)
    for rank in (case.parallel.ranks[0], case.parallel.ranks[-1]):
        for model, optimizer in built(case, rank):
            shards = [*optimizer_tensors(optimizer)]
            for param in (*named_params(model).values(), *shards):
                param.detach().fill_(torch.nan)
            blocks = model_blocks(model, prefix="actor", own_share=False)
            of_optimizer = optimizer_blocks(model, optimizer, prefix="actor", own_share=False)
            shards = [*optimizer_tensors(optimizer)]  # now with moments
            assert {block.key.split(".")[0] for block in (*blocks, *of_optimizer)} <= {"actor"}
            for block in (*blocks, *of_optimizer):
                block.data.fill_(1)
            weights_loaded(model, optimizer, with_masters=True)
            padding = 0
            for param in named_params(model).values():
                assert torch.isin(param, torch.tensor([0.0, 1.0])).all()
                padding += int((param == 0).sum())
            vocabulary = -(-case.spec.vocab_size // case.parallel.tp) * case.parallel.tp
            if case.head is Head.LM and case.parallel.tp > 1 and rank == case.parallel.ranks[-1]:
                assert padding == (vocabulary - case.spec.vocab_size) * case.spec.hidden_size * heads_of(model)
            else:
                assert padding == 0 or case.head is Head.VALUE
            for shard in shards:
                assert torch.isin(shard, torch.tensor([0.0, 1.0])).all()


def heads_of(model: MegatronModel) -> int:
    """Tensors of a rank that have rows of the vocabulary."""
    return sum(name.endswith(("word_embeddings.weight", "output_layer.weight")) for name in named_params(model))


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Moments and weights that the optimizer updates on this rank."""
    for part in optimizer.megatron.chained_optimizers:
        if not part.is_stub_optimizer:
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (state[kind] for kind in ("exp_avg", "exp_avg_sq"))


def test_a_range_of_a_matrix_is_at_most_three_boxes_that_hold_its_elements_in_order() -> None:
    matrix = torch.arange(35).reshape(7, 5)
    for start in range(36):
        for stop in range(start, 36):
            found = list(boxes_of_range(matrix.shape, range(start, stop)))
            assert len(found) <= 3
            assert [int(at) for box, at in found] == [
                sum(prod(box.shape) for box, _ in found[:i]) for i in range(len(found))
            ]
            elements = [matrix[box.slices].reshape(-1) for box, _ in found]
            assert torch.equal(torch.cat([torch.zeros(0, dtype=torch.int64), *elements]), torch.arange(start, stop))
    assert list(boxes_of_range((9,), range(2, 2))) == []


def test_all_logical_tensors_are_stored() -> None:
    for case in CASES:
        names = {tensor.name for tensor in logical_tensors(case.spec, head=case.head)}
        assert {piece.tensor for piece in stored_pieces(case.spec, head=case.head)} == names
