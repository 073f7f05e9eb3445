"""Keys, shapes and places in a checkpoint are what Megatron-Core's own modules say of every rank's parameters."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import layers_before
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.param_names import local_name
from rlhf.mcore.stored import VOCABULARY_KEYS, extra_state_keys, held_of_stored, other_key, stored_shapes
from rlhf.reshard.layout import Box
from tests.mcore.fake_ranks import as_rank
from tests.mcore.stand_in import tiny_moe_spec, tiny_spec

QWEN2 = {"family": "qwen2", "qkv_bias": True}
CASES: tuple[tuple[ModelSpec, ParallelConfig, Head], ...] = (
    (tiny_spec(), ParallelConfig(), Head.LM),
    (tiny_spec(**QWEN2, tied_embeddings=True), ParallelConfig(tp=2, pp=2, dp=2), Head.LM),
    (tiny_spec(**QWEN2, num_kv_heads=2), ParallelConfig(tp=2, layers_per_stage=(4,)), Head.VALUE),
    (
        tiny_spec(family="qwen3", qk_norm=True, num_layers=7, vocab_size=5),
        ParallelConfig(tp=4, pp=2, vpp=3, layers_per_stage=(1, 1, 2, 1, 1, 1)),
        Head.LM,
    ),
    (tiny_spec(num_layers=3), ParallelConfig(pp=2, layers_per_stage=(1, 2), first_rank=1), Head.VALUE),
    (tiny_moe_spec(), ParallelConfig(tp=2, dp=2, ep=2), Head.LM),
    (tiny_moe_spec(tied_embeddings=True), ParallelConfig(tp=2, pp=2, dp=2, ep=2, etp=2), Head.LM),
    (tiny_moe_spec(family="mixtral", qk_norm=False), ParallelConfig(pp=2, vpp=2, dp=4, ep=2, etp=2), Head.VALUE),
)

Place = tuple[str, int, str, tuple[int, ...], Box]
"""Parameter, number of its element that comes first, key, whole shape, box of the stored tensor."""


def said_by_megatron(model: MegatronModel) -> tuple[set[Place], set[str]]:
    """Of this rank's parameters, and keys of its objects.

    Padding of the vocabulary is cut off, for which Megatron accepts any number of rows.
    """
    found, objects = set(), set()
    before = layers_before(model.spec, model.parallel, model.groups.pp_rank)
    ours = {other_key(key): key for key in stored_shapes(model.spec, head=model.head)}
    for module, start in zip(model.modules, before, strict=True):
        state = module.sharded_state_dict(metadata={"dp_cp_group": model.groups.collection.dp_cp})
        for name, entry in state.items():
            if isinstance(entry, ShardedObject):
                assert entry.data is None
                objects.add(entry.unique_key)
                continue
            shards = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            for shard in shards:
                assert isinstance(shard, ShardedTensor)
                lead = shard.prepend_axis_num
                spans = [(at, at + 1) for at in shard.global_offset[:lead]]
                for at, extent in zip(shard.global_offset[lead:], shard.local_shape, strict=True):
                    spans.append((at, at + extent))
                shape = list(shard.global_shape)
                if shard.key in VOCABULARY_KEYS and shard.allow_shape_mismatch and shape[0] > 1:
                    shape[0] = model.spec.vocab_size
                    spans[0] = (spans[0][0], min(spans[0][1], shape[0]))
                if spans[0][0] < spans[0][1]:
                    place = (ours.get(shard.key, shard.key), tuple(shape), Box(tuple(spans)))
                    assert isinstance(shard.data, Tensor)
                    found.add((local_name(name, start), shard.data.storage_offset(), *place))
    return found, objects


def said_with_layers_apart(model: MegatronModel) -> set[tuple[str, tuple[int, ...]]]:
    """(key, shape) of what this rank has of stored tensors when each layer has its own; padding cut off as above."""
    ours = {other_key(key): key for key in stored_shapes(model.spec, head=model.head, layers_apart=True)}
    found = set()
    for module in model.modules:
        metadata = {"dp_cp_group": model.groups.collection.dp_cp, "non_homogeneous_layers": True}
        for entry in module.sharded_state_dict(metadata=metadata).values():
            for shard in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
                if isinstance(shard, ShardedTensor):
                    is_vocabulary = shard.key in VOCABULARY_KEYS and shard.global_shape[0] > 1
                    rows = model.spec.vocab_size if is_vocabulary else shard.global_shape[0]
                    found.add((ours.get(shard.key, shard.key), (rows, *shard.global_shape[1:])))
    return found


def said_by_us(model: MegatronModel) -> set[Place]:
    shapes = stored_shapes(model.spec, head=model.head)
    found = set()
    for piece in held_of_stored(model.spec, model.parallel, head=model.head, rank=model.groups.rank):
        columns = {name: param.shape[-1] for name, param in params_of(model).items()}[piece.tensor]
        first = [start for start, _ in piece.box.spans]
        offset = first[0] * columns + first[1] if len(first) == 2 else first[0]
        found.add((piece.tensor, offset, piece.key, shapes[piece.key], piece.stored_box(piece.box)))
    return found


def params_of(model: MegatronModel) -> dict[str, Tensor]:
    before = layers_before(model.spec, model.parallel, model.groups.pp_rank)
    return {
        local_name(name, start): param
        for module, start in zip(model.modules, before, strict=True)
        for name, param in module.named_parameters()
    }


@pytest.mark.parametrize("case", range(len(CASES)))
def test_megatrons_modules_say_the_same_of_every_rank(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, parallel, head = CASES[case]
    keys, objects, apart = set(), set(), set()
    for rank in parallel.ranks:
        with as_rank(parallel, rank) as groups:
            # Some modules of the local spec keep no group and ask the global, and so does a tied head.
            monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", groups.collection.tp)
            monkeypatch.setattr(parallel_state, "_DATA_PARALLEL_GROUP_WITH_CP", groups.collection.dp_cp)
            model = build_model(
                spec,
                ModelConfig(path="-"),
                parallel,
                groups,
                head=head,
                device=torch.device("cpu"),
                seed=1,
                trainable=False,
            )
            wanted, of_rank = said_by_megatron(model)
            objects |= of_rank
            apart |= said_with_layers_apart(model)
            assert said_by_us(model) == wanted, f"rank {rank}"
            keys |= {key for _, _, key, _, _ in wanted}
    assert keys == set(stored_shapes(spec, head=head))
    assert apart == set(stored_shapes(spec, head=head, layers_apart=True).items())
    # Local layers ask for the state of their linear layers, of all layers and experts.
    linear = {key for key in extra_state_keys(spec) if ".linear_" in key}
    assert objects == linear
