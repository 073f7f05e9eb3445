"""Where SGLang keeps each weight. `test_sglang_models.py` compares with SGLang's own modules."""

from dataclasses import replace

import pytest
import torch

from rlhf.errors import LayoutError
from rlhf.families.spec import ModelSpec
from rlhf.rollout.sglang.layout import (
    Sizes,
    check_sizes,
    check_table,
    folded,
    padding_elements,
    param_shapes,
    sglang_layout,
)

DENSE = ModelSpec(
    family="llama",
    vocab_size=131,
    hidden_size=44,
    ffn_size=52,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_positions=307,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
)
EXPERTS = {"num_experts": 6, "experts_per_token": 3, "moe_ffn_size": 36, "norm_topk_prob": True}
SPECS = {
    "llama": DENSE,
    "mistral": replace(DENSE, family="mistral", sliding_window=64),
    "qwen2": replace(DENSE, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(DENSE, family="qwen3", qk_norm=True, tied_embeddings=True),
    "qwen3_moe": replace(DENSE, family="qwen3_moe", qk_norm=True, **EXPERTS),
    "mixtral": replace(DENSE, family="mixtral", tied_embeddings=True, **EXPERTS),
}
CASES = [(name, tp, 1) for name in SPECS for tp in (1, 2, 4)] + [
    (name, tp, ep) for name in ("qwen3_moe", "mixtral") for tp, ep in ((2, 2), (4, 2))
]


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_an_engine_holds_every_element_and_replicates_only_what_sglang_replicates(name, tp, ep):
    spec = SPECS[name]
    layout = sglang_layout(spec, tp=tp, ep=ep, dp=2, first_rank=3, dtype="float32")
    assert layout.ranks == tuple(range(3, 3 + 2 * tp))
    for engine in (0, 1):
        held = {tensor: torch.zeros(shape, dtype=torch.int64) for tensor, shape in layout.tensors.items()}
        for rank in range(3 + engine * tp, 3 + engine * tp + tp):
            for piece in layout.holdings(rank):
                held[piece.tensor][piece.box.slices] += 1
        for tensor, count in held.items():
            times = 1
            if "norm" in tensor or tensor.endswith(".gate.weight"):
                times = tp
            elif "k_proj" in tensor or "v_proj" in tensor:
                times = max(1, tp // 2)
            elif name == "mixtral" and "embed" in tensor:
                times = 2  # its SGLang model has an output layer of its own
            assert (count == times).all(), tensor


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_blocks_fill_their_parameters_once_but_for_the_padding(name, tp, ep):
    spec, sizes = SPECS[name], Sizes(tp, ep)
    layout, shapes = sglang_layout(spec, tp=tp, ep=ep, dp=1, first_rank=0, dtype="float32"), param_shapes(spec, sizes)
    for rank in layout.ranks:
        used = {param: torch.zeros(folded(shape), dtype=torch.int64) for param, shape in shapes.items()}
        for piece in layout.holdings(rank):
            block = used[piece.param][piece.param_box(piece.box).slices]
            assert tuple(block.shape) == piece.box.shape
            block += 1
        padding = padding_elements(spec, sizes, rank)
        for param, count in used.items():
            assert int((count == 0).sum()) == padding.get(param, 0), param
            assert int(count.max()) <= 1
        assert set(padding) <= {"model.embed_tokens.weight", "lm_head.weight"}
        rows = shapes["model.embed_tokens.weight"][0]
        real = max(0, min(rows, spec.vocab_size - rank * rows))
        assert padding.get("model.embed_tokens.weight", 0) == (rows - real) * spec.hidden_size


def test_the_vocabulary_is_padded_as_sglang_does():
    spec = replace(DENSE, vocab_size=1000, num_heads=12, num_kv_heads=3)
    rows = {tp: param_shapes(spec, Sizes(tp))["lm_head.weight"][0] for tp in (1, 2, 4)}
    assert rows == {1: 1024, 2: 512, 4: 256}
    # 1024 is no multiple of 3: padded to a multiple of 3 * 64
    assert param_shapes(replace(spec, ffn_size=60), Sizes(3))["lm_head.weight"][0] == 1152 // 3


def test_q_lies_above_k_above_v_and_gate_above_up():
    """Rank 2 of 4: its query head, the second of two KV heads, which rank 3 holds too, and a quarter of the FFN."""
    layout = sglang_layout(SPECS["qwen2"], tp=4, dp=1, first_rank=0, dtype="float32")
    held = {piece.tensor: piece for piece in layout.holdings(2)}
    for part, rows, start in (
        ("self_attn.q_proj.weight", (32, 48), 0),
        ("self_attn.k_proj.weight", (16, 32), 16),
        ("self_attn.v_proj.weight", (16, 32), 32),
        ("mlp.gate_proj.weight", (26, 39), 0),
        ("mlp.up_proj.weight", (26, 39), 13),
    ):
        piece = held[f"model.layers.1.{part}"]
        assert piece.param.endswith("qkv_proj.weight" if "attn" in part else "gate_up_proj.weight")
        assert (piece.box.spans, piece.param_start) == ((rows, (0, 44)), (start, 0)), part
    assert held["model.layers.1.self_attn.v_proj.bias"].param_start == (32,)


def test_an_expert_lies_as_one_block_of_gate_above_up():
    layout = sglang_layout(SPECS["qwen3_moe"], tp=4, ep=2, dp=1, first_rank=0, dtype="float32")
    held = {piece.tensor: piece for piece in layout.holdings(3)}  # experts 3..5, second half of each
    prefix = "model.layers.1.mlp.experts"
    assert f"{prefix}.2.up_proj.weight" not in held
    up, down = held[f"{prefix}.4.up_proj.weight"], held[f"{prefix}.4.down_proj.weight"]
    assert (up.param, up.box.spans, up.param_start) == (f"{prefix}.w13_weight", ((18, 36), (0, 44)), (1 * 36 + 18, 0))
    assert (down.param, down.box.spans, down.param_start) == (f"{prefix}.w2_weight", ((0, 44), (18, 36)), (44, 0))


@pytest.mark.parametrize(
    ("name", "sizes", "named"),
    [
        ("llama", Sizes(3), r"rollout\.tp: 3 given for num_heads = 4"),
        ("llama", Sizes(2, 2), r"rollout\.sglang\.ep: 2 given for rollout\.tp = 2 and 0 experts"),
        ("qwen3_moe", Sizes(4, 4), r"rollout\.sglang\.ep: 4 given for rollout\.tp = 4 and 6 experts"),
        ("qwen3_moe", Sizes(2, 3), r"rollout\.sglang\.ep: 3 given for rollout\.tp = 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(name, sizes, named):
    with pytest.raises(LayoutError, match=named):
        check_sizes(SPECS[name], sizes)
    with pytest.raises(LayoutError, match="2 ranks share moe_ffn_size = 35"):
        check_sizes(replace(SPECS["mixtral"], moe_ffn_size=35), Sizes(2))


def test_a_difference_from_what_the_engine_reports_is_named():
    spec, sizes = SPECS["qwen3"], Sizes(2)
    good = {name: (shape, "float32") for name, shape in param_shapes(spec, sizes).items()}
    check_table(spec, sizes, "float32", good, where="engine 0")
    norm, qkv = "model.layers.1.self_attn.q_norm.weight", "model.layers.0.self_attn.qkv_proj.weight"
    wrong = {
        rf"engine 0: the engine has no parameter {norm}; needs one of shape \(16,\)": {
            name: found for name, found in good.items() if name != norm
        },
        rf"the engine's {qkv} has shape \(96, 44\); needs \(64, 44\)": {**good, qkv: ((96, 44), "float32")},
        rf"the engine's {qkv} is bfloat16; needs float32": {**good, qkv: ((64, 44), "bfloat16")},
        r"the engine has a parameter lm_head\.weight of shape \(96, 44\); needs none": {
            **good,
            "lm_head.weight": ((96, 44), "float32"),
        },
    }
    for named, table in wrong.items():
        with pytest.raises(LayoutError, match=named):
            check_table(spec, sizes, "float32", table, where="engine 0")
