"""Where each logical tensor lies in the native engine's parameters: a pure function of spec and sizes.

Parameters of one rank (h, kv = its query and KV heads, d = head dim, F = its share of the FFN):
`layers.i.qkv.weight` [(h + 2 kv) d, hidden] is q above k above v; `layers.i.gate_up.weight` [2 F, hidden] is gate above
up. With E experts, `layers.i.experts.gate_up.weight` [E 2 F, hidden] and `layers.i.experts.down.weight` [E hidden, F]
have the same of each expert, one below the other; every rank has a share of all experts, and the whole router.
`embed.weight` and `lm_head.weight` hold `vocab_rows` rows, of which those beyond the vocabulary are zero and belong to
no box.
"""

from functools import cache
from math import ceil

from rlhf.errors import LayoutError
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, LogicalTensor, ModelSpec, Part
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout, Span
from rlhf.rollout.placement import engine_grid

VOCAB_MULTIPLE = 64
"""A rank's vocabulary rows are a multiple of this, which the sampler's two-level search needs."""

_PARAM = {
    Part.EMBED: "embed.weight",
    Part.ATTN_NORM: "attn_norm.weight",
    Part.Q: "qkv.weight",
    Part.K: "qkv.weight",
    Part.V: "qkv.weight",
    Part.Q_BIAS: "qkv.bias",
    Part.K_BIAS: "qkv.bias",
    Part.V_BIAS: "qkv.bias",
    Part.Q_NORM: "q_norm.weight",
    Part.K_NORM: "k_norm.weight",
    Part.ATTN_OUT: "attn_out.weight",
    Part.MLP_NORM: "mlp_norm.weight",
    Part.GATE: "gate_up.weight",
    Part.UP: "gate_up.weight",
    Part.DOWN: "down.weight",
    Part.ROUTER: "router.weight",
    Part.EXPERT_GATE: "experts.gate_up.weight",
    Part.EXPERT_UP: "experts.gate_up.weight",
    Part.EXPERT_DOWN: "experts.down.weight",
    Part.FINAL_NORM: "final_norm.weight",
    Part.LM_HEAD: "lm_head.weight",
}


def check_tp(spec: ModelSpec, tp: int) -> None:
    """Raise LayoutError unless tp ranks can share the model's heads and FFN, or each expert's."""
    name, ffn = _ffn(spec)
    if spec.num_heads % tp or ffn % tp:
        raise LayoutError(
            f"rollout.tp: {tp} does not divide num_heads = {spec.num_heads} and {name} = {ffn}; "
            "needs a common divisor; change rollout.tp"
        )
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        raise LayoutError(
            f"rollout.tp: {tp} and num_kv_heads = {spec.num_kv_heads}; needs one to divide the other; change rollout.tp"
        )


def _ffn(spec: ModelSpec) -> tuple[str, int]:
    """The setting that the FFN's width has in a model's config, and the width."""
    return ("moe_ffn_size", spec.moe_ffn_size) if spec.num_experts else ("ffn_size", spec.ffn_size)


def local_heads(spec: ModelSpec, tp: int) -> tuple[int, int]:
    """Query heads and KV heads of one rank; where tp exceeds num_kv_heads a KV head is held by several ranks."""
    return spec.num_heads // tp, max(1, spec.num_kv_heads // tp)


def vocab_rows(spec: ModelSpec, tp: int) -> int:
    """Vocabulary rows of one rank, padding included."""
    return ceil(spec.vocab_size / (tp * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE


def param_shapes(spec: ModelSpec, tp: int) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of one rank; the same on every rank."""
    heads, kv_heads = local_heads(spec, tp)
    qkv, hidden, ffn = (heads + 2 * kv_heads) * spec.head_dim, spec.hidden_size, _ffn(spec)[1] // tp
    shapes = {
        "embed.weight": (vocab_rows(spec, tp), hidden),
        "lm_head.weight": (vocab_rows(spec, tp), hidden),
        "final_norm.weight": (hidden,),
        "attn_norm.weight": (hidden,),
        "mlp_norm.weight": (hidden,),
        "qkv.weight": (qkv, hidden),
        "qkv.bias": (qkv,),
        "q_norm.weight": (spec.head_dim,),
        "k_norm.weight": (spec.head_dim,),
        "attn_out.weight": (hidden, heads * spec.head_dim),
        "gate_up.weight": (2 * ffn, hidden),
        "down.weight": (hidden, ffn),
        "router.weight": (spec.num_experts, hidden),
        "experts.gate_up.weight": (spec.num_experts * 2 * ffn, hidden),
        "experts.down.weight": (spec.num_experts * hidden, ffn),
    }
    return {param_name(t): shapes[_PARAM[t.part]] for t in logical_tensors(spec, head=Head.LM)}


def param_name(tensor: LogicalTensor) -> str:
    """The parameter that holds a logical tensor, alone or with others."""
    name = _PARAM[tensor.part]
    return name if tensor.layer < 0 else f"layers.{tensor.layer}.{name}"


def native_layout(spec: ModelSpec, *, tp: int, dp: int, first_rank: int, stride: int = 1, dtype: str) -> ModelLayout:
    """What each rank of the rollout pool holds: dp engines of tp ranks each. Pure; no process group.

    Raises:
        LayoutError: tp ranks cannot share the model.
    """
    check_tp(spec, tp)
    tensors = logical_tensors(spec, head=Head.LM)
    grid = engine_grid(tp=tp, dp=dp, first_rank=first_rank, stride=stride)

    @cache
    def shard(tp_rank: int) -> tuple[ParamLayout, ...]:
        found = (_held(spec, tensor, tp, tp_rank) for tensor in tensors)
        return tuple(piece for piece in found if piece is not None)

    def holdings(rank: int) -> tuple[ParamLayout, ...]:
        return shard(grid.coords(rank)["tp"])

    return ModelLayout(
        tensors={t.name: t.shape for t in tensors}, dtype=dtype, ranks=tuple(grid.ranks), holdings=holdings
    )


def _held(spec: ModelSpec, tensor: LogicalTensor, tp: int, tp_rank: int) -> ParamLayout | None:
    dim, span, at = _cut(spec, tensor, tp, tp_rank)
    if span[0] >= span[1]:
        return None
    spans, start = [(0, extent) for extent in tensor.shape], [0] * len(tensor.shape)
    spans[dim], start[dim] = span, at
    if tensor.expert > 0:
        rows = spec.hidden_size if tensor.part is Part.EXPERT_DOWN else 2 * spec.moe_ffn_size // tp
        start[0] += tensor.expert * rows
    return ParamLayout(tensor.name, Box(tuple(spans)), param_name(tensor), tuple(start))


def _cut(spec: ModelSpec, tensor: LogicalTensor, tp: int, tp_rank: int) -> tuple[int, Span, int]:
    """(dim that ranks share, this rank's indices along it, where they start in the parameter)."""
    part, heads, kv_heads = tensor.part, *local_heads(spec, tp)
    if part in (Part.EMBED, Part.LM_HEAD):
        rows = vocab_rows(spec, tp)
        return 0, (tp_rank * rows, min((tp_rank + 1) * rows, spec.vocab_size)), 0
    if part in (Part.Q, Part.Q_BIAS):
        return 0, _rows(tp_rank * heads, heads, spec.head_dim), 0
    if part in (Part.K, Part.K_BIAS, Part.V, Part.V_BIAS):
        before = heads + (kv_heads if part in (Part.V, Part.V_BIAS) else 0)
        return 0, _rows(tp_rank * spec.num_kv_heads // tp, kv_heads, spec.head_dim), before * spec.head_dim
    if part in (Part.GATE, Part.UP, Part.EXPERT_GATE, Part.EXPERT_UP):
        ffn = tensor.shape[0] // tp
        return 0, _rows(tp_rank, 1, ffn), ffn if part in (Part.UP, Part.EXPERT_UP) else 0
    if part in (Part.ATTN_OUT, Part.DOWN, Part.EXPERT_DOWN):
        return 1, _rows(tp_rank, 1, tensor.shape[1] // tp), 0
    return 0, (0, tensor.shape[0]), 0


def _rows(first: int, count: int, size: int) -> Span:
    return first * size, (first + count) * size
