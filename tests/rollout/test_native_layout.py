"""Where the native engine keeps each weight."""

from dataclasses import replace

import pytest
import torch

from rlhf.errors import LayoutError
from rlhf.families.registry import spec_of
from rlhf.rollout.native.layout import native_layout, param_shapes
from tests.rollout.tiny import CASES, COMMON

SPECS = {name: spec_of(cls(**{**COMMON, **extra}).to_dict(), where=name) for name, (cls, extra) in CASES.items()}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_an_engine_holds_every_element_and_replicates_only_norms_and_shared_kv_heads(name, tp):
    spec = SPECS[name]
    layout = native_layout(spec, tp=tp, dp=2, first_rank=3, dtype="float32")
    assert layout.ranks == tuple(range(3, 3 + 2 * tp))
    for engine in (0, 1):
        held = {tensor: torch.zeros(shape, dtype=torch.int64) for tensor, shape in layout.tensors.items()}
        for rank in range(3 + engine * tp, 3 + engine * tp + tp):
            for piece in layout.holdings(rank):
                held[piece.tensor][piece.box.slices] += 1
        for tensor, count in held.items():
            kv = any(part in tensor for part in ("k_proj", "v_proj"))
            times = tp if "norm" in tensor or tensor.endswith(".gate.weight") else max(1, tp // 2) if kv else 1
            assert (count == times).all(), tensor


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_blocks_lie_inside_their_parameters_without_overlap(name, tp):
    spec = SPECS[name]
    layout, shapes = native_layout(spec, tp=tp, dp=1, first_rank=0, dtype="float32"), param_shapes(SPECS[name], tp)
    for rank in layout.ranks:
        used = {param: torch.zeros(shape, dtype=torch.int64) for param, shape in shapes.items()}
        for piece in layout.holdings(rank):
            block = used[piece.param][piece.param_box(piece.box).slices]
            assert tuple(block.shape) == piece.box.shape
            block += 1
        for param, count in used.items():
            if param in ("embed.weight", "lm_head.weight"):
                rows = count.shape[0]
                real = max(0, min(rows, spec.vocab_size - rank * rows))
                assert (count[:real] == 1).all()
                assert (count[real:] == 0).all()
            else:
                assert (count == 1).all(), param


def test_query_heads_sit_on_the_rank_that_holds_their_kv_head():
    spec = replace(SPECS["llama"], num_heads=12, num_kv_heads=3, ffn_size=60)
    d = spec.head_dim
    for tp, kv_heads in ((3, ((0,), (1,), (2,))), (6, ((0,), (0,), (1,), (1,), (2,), (2,)))):
        layout = native_layout(spec, tp=tp, dp=1, first_rank=0, dtype="float32")
        for rank, heads in enumerate(kv_heads):
            spans = {p.tensor: p.box.spans[0] for p in layout.holdings(rank) if ".0." in p.tensor}
            assert spans["model.layers.0.self_attn.k_proj.weight"] == (heads[0] * d, (heads[-1] + 1) * d)
            first, stop = spans["model.layers.0.self_attn.q_proj.weight"]
            assert {head // 4 for head in range(first // d, stop // d)} == set(heads)


def test_sizes_that_do_not_share_the_heads_are_refused_by_name():
    spec = replace(SPECS["llama"], num_heads=12, num_kv_heads=3, ffn_size=60)
    with pytest.raises(LayoutError, match=r"rollout\.tp: 5 does not divide"):
        native_layout(spec, tp=5, dp=1, first_rank=0, dtype="float32")
    with pytest.raises(LayoutError, match=r"rollout\.tp: 2 and num_kv_heads = 3"):
        native_layout(spec, tp=2, dp=1, first_rank=0, dtype="float32")
    with pytest.raises(LayoutError, match="and moe_ffn_size = 28; needs a common divisor"):
        native_layout(
            replace(SPECS["mixtral"], num_heads=12, num_kv_heads=3), tp=3, dp=1, first_rank=0, dtype="float32"
        )
    with pytest.raises(LayoutError, match="ffn_size = 52"):
        native_layout(replace(spec, ffn_size=52), tp=3, dp=1, first_rank=0, dtype="float32")
