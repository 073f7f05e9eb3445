"""Where each logical tensor lies in the parameters of SGLang's tensor-parallel ranks: a function of spec and sizes.

Parameters of one rank (h, kv = its query and KV heads, d = head dim, F = its share of the FFN, E = its experts):
`self_attn.qkv_proj.weight` [(h + 2 kv) d, hidden] is q above k above v; `mlp.gate_up_proj.weight` [2 F, hidden] is gate
above up; `mlp.experts.w13_weight` [E, 2 F, hidden] and `w2_weight` [E, hidden, F] are one such block an expert. The
layout sees those of three dims with the first two joined (`folded`). Embedding and lm head hold rows beyond the
vocabulary, which belong to no box. Seen in SGLang 0.5.23; `check_table` compares with what an engine says of itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, prod

from rlhf.errors import LayoutError
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, LogicalTensor, ModelSpec, Part
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout, Span
from rlhf.rollout.placement import engine_grid

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this, and of this times tp where the first is no multiple of tp."""

_LAYER_PARAM = {
    Part.ATTN_NORM: "input_layernorm.weight",
    Part.Q: "self_attn.qkv_proj.weight",
    Part.K: "self_attn.qkv_proj.weight",
    Part.V: "self_attn.qkv_proj.weight",
    Part.Q_BIAS: "self_attn.qkv_proj.bias",
    Part.K_BIAS: "self_attn.qkv_proj.bias",
    Part.V_BIAS: "self_attn.qkv_proj.bias",
    Part.Q_NORM: "self_attn.q_norm.weight",
    Part.K_NORM: "self_attn.k_norm.weight",
    Part.ATTN_OUT: "self_attn.o_proj.weight",
    Part.MLP_NORM: "post_attention_layernorm.weight",
    Part.GATE: "mlp.gate_up_proj.weight",
    Part.UP: "mlp.gate_up_proj.weight",
    Part.DOWN: "mlp.down_proj.weight",
    Part.ROUTER: "{mlp}.gate.weight",
    Part.EXPERT_GATE: "{mlp}.experts.w13_weight",
    Part.EXPERT_UP: "{mlp}.experts.w13_weight",
    Part.EXPERT_DOWN: "{mlp}.experts.w2_weight",
}
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_OUTER_PARAM = {Part.EMBED: EMBEDDING, Part.FINAL_NORM: "model.norm.weight", Part.LM_HEAD: LM_HEAD}

_MLP_NAME = {"mixtral": "block_sparse_moe"}
"""What a family's layer calls its experts' module, where it is not `mlp`."""

_UNTIED = ("qwen3_moe", "mixtral")
"""Families whose SGLang model always has an output layer of its own, also where the checkpoint ties it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How one engine is cut: `tp` ranks, of which groups of tp / ep share each of `ep` parts of the experts."""

    tp: int
    ep: int = 1

    @property
    def moe_tp(self) -> int:
        """Ranks that share an expert."""
        return self.tp // self.ep

    def moe_ranks(self, tp_rank: int) -> tuple[int, int]:
        """(part of the experts, share of each of them) of a rank."""
        return tp_rank // self.moe_tp, tp_rank % self.moe_tp


def check_sizes(spec: ModelSpec, sizes: Sizes) -> None:
    """Raise LayoutError unless SGLang can cut the model so."""
    tp, ep = sizes.tp, sizes.ep
    if spec.num_heads % tp or (spec.num_kv_heads % tp and tp % spec.num_kv_heads):
        raise LayoutError(
            f"rollout.tp: {tp} given for num_heads = {spec.num_heads} and num_kv_heads = {spec.num_kv_heads}; needs a "
            "divisor of the first that divides the second or is a multiple of it; change rollout.tp"
        )
    if tp % ep or (ep > 1 and spec.num_experts % ep) or (ep > 1 and not spec.num_experts):
        raise LayoutError(
            f"rollout.sglang.ep: {ep} given for rollout.tp = {tp} and {spec.num_experts} experts; needs a divisor of "
            "both; change rollout.sglang.ep"
        )
    what, size, share = ("ffn_size", spec.ffn_size, tp)
    if spec.num_experts:
        what, size, share = ("moe_ffn_size", spec.moe_ffn_size, sizes.moe_tp)
    if size % share:
        raise LayoutError(
            f"rollout.tp: {tp} given, so that {share} ranks share {what} = {size}; needs a divisor; change rollout.tp"
        )


def vocab_rows(spec: ModelSpec, tp: int) -> int:
    """Vocabulary rows of one rank, padding included."""
    padded = ceil(spec.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % tp:
        padded = ceil(spec.vocab_size / (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE * tp
    return padded // tp


def param_shapes(spec: ModelSpec, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of one rank by SGLang's own name, as SGLang has it; the same on every rank."""
    tp, hidden, dim = sizes.tp, spec.hidden_size, spec.head_dim
    heads, kv_heads = _local_heads(spec, tp)
    qkv, ffn, experts = (heads + 2 * kv_heads) * dim, spec.ffn_size // tp, spec.num_experts // sizes.ep
    moe_ffn = spec.moe_ffn_size // sizes.moe_tp
    shapes: dict[str, tuple[int, ...]] = {
        "qkv_proj.weight": (qkv, hidden),
        "qkv_proj.bias": (qkv,),
        "q_norm.weight": (dim,),
        "k_norm.weight": (dim,),
        "o_proj.weight": (hidden, heads * dim),
        "gate_up_proj.weight": (2 * ffn, hidden),
        "down_proj.weight": (hidden, ffn),
        "gate.weight": (spec.num_experts, hidden),
        "experts.w13_weight": (experts, 2 * moe_ffn, hidden),
        "experts.w2_weight": (experts, hidden, moe_ffn),
        "embed_tokens.weight": (vocab_rows(spec, tp), hidden),
        "lm_head.weight": (vocab_rows(spec, tp), hidden),
    }
    names = {name for tensor in logical_tensors(spec, head=Head.LM) for name in _params(spec, tensor)}
    return {name: shapes.get(".".join(name.split(".")[-2:]), (hidden,)) for name in sorted(names)}


def padding_elements(spec: ModelSpec, sizes: Sizes, tp_rank: int) -> dict[str, int]:
    """Elements of a rank's parameters that hold no weight: the rows beyond the vocabulary."""
    rows = vocab_rows(spec, sizes.tp)
    held = max(0, min((tp_rank + 1) * rows, spec.vocab_size) - tp_rank * rows)
    found = {name: (rows - held) * spec.hidden_size for name in (EMBEDDING, LM_HEAD)}
    return {name: count for name, count in found.items() if count and name in param_shapes(spec, sizes)}


def folded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A parameter's shape with all dims but the last joined, where it has three."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape


def sglang_layout(
    spec: ModelSpec, *, tp: int, ep: int = 1, dp: int, first_rank: int, stride: int = 1, dtype: str
) -> ModelLayout:
    """What each rank of the rollout pool holds: dp engines of tp ranks each. Pure; no process group.

    Raises:
        LayoutError: SGLang cannot cut the model so.
    """
    sizes = Sizes(tp, ep)
    check_sizes(spec, sizes)
    tensors = logical_tensors(spec, head=Head.LM)
    grid = engine_grid(tp=tp, dp=dp, first_rank=first_rank, stride=stride)

    @cache
    def shard(tp_rank: int) -> tuple[ParamLayout, ...]:
        return tuple(piece for tensor in tensors for piece in _held(spec, tensor, sizes, tp_rank))

    def holdings(rank: int) -> tuple[ParamLayout, ...]:
        return shard(grid.coords(rank)["tp"])

    return ModelLayout(
        tensors={t.name: t.shape for t in tensors}, dtype=dtype, ranks=tuple(grid.ranks), holdings=holdings
    )


def check_table(
    spec: ModelSpec, sizes: Sizes, dtype: str, table: Mapping[str, tuple[tuple[int, ...], str]], *, where: str
) -> None:
    """Compare the tables with an engine's own word: name -> (shape, dtype) of every parameter of one of its ranks.

    Raises:
        LayoutError: The first difference: what was found, what is needed.
    """
    expected = param_shapes(spec, sizes)
    advice = (
        "run the SGLang that this version was made for, with the same tp and ep; on CPUs, where it pads MLPs to a "
        "multiple of 32 a rank and heads to a multiple of tp, choose a tp that needs no padding"
    )
    for name, shape in expected.items():
        if name not in table:
            raise LayoutError(f"{where}: the engine has no parameter {name}; needs one of shape {shape}; {advice}")
        found_shape, found_dtype = table[name]
        if tuple(found_shape) != shape:
            raise LayoutError(
                f"{where}: the engine's {name} has shape {tuple(found_shape)}; needs {shape} for tp = {sizes.tp}, "
                f"ep = {sizes.ep}; {advice}"
            )
        if found_dtype != dtype:
            raise LayoutError(
                f"{where}: the engine's {name} is {found_dtype}; needs {dtype}, as the actor's: nothing is cast on the "
                "way; start the engine with the dtype of the actor"
            )
    for name, (shape, _) in table.items():
        if name not in expected:
            raise LayoutError(
                f"{where}: the engine has a parameter {name} of shape {tuple(shape)}; needs none of that name for "
                f"family {spec.family}; {advice}"
            )


def _local_heads(spec: ModelSpec, tp: int) -> tuple[int, int]:
    return spec.num_heads // tp, max(1, spec.num_kv_heads // tp)


def _params(spec: ModelSpec, tensor: LogicalTensor) -> tuple[str, ...]:
    """Parameters that hold a tensor: two for the embedding where SGLang keeps a tied output layer apart."""
    if tensor.layer >= 0:
        name = _LAYER_PARAM[tensor.part].format(mlp=_MLP_NAME.get(spec.family, "mlp"))
        return (f"model.layers.{tensor.layer}.{name}",)
    if tensor.part is Part.EMBED and spec.tied_embeddings and spec.family in _UNTIED:
        return EMBEDDING, LM_HEAD
    return (_OUTER_PARAM[tensor.part],)


def _held(spec: ModelSpec, tensor: LogicalTensor, sizes: Sizes, tp_rank: int) -> list[ParamLayout]:
    dim, span, at = (_cut if tensor.expert < 0 else _expert_cut)(spec, tensor, sizes, tp_rank)
    if span[0] >= span[1]:
        return []
    spans, start = [(0, extent) for extent in tensor.shape], [0] * len(tensor.shape)
    spans[dim] = span
    start[dim if tensor.part is not Part.EXPERT_DOWN else 0] = at
    return [ParamLayout(tensor.name, Box(tuple(spans)), param, tuple(start)) for param in _params(spec, tensor)]


def _cut(spec: ModelSpec, tensor: LogicalTensor, sizes: Sizes, tp_rank: int) -> tuple[int, Span, int]:
    """(dim that ranks share, this rank's indices along it, row or column of the parameter where they start)."""
    part, tp = tensor.part, sizes.tp
    heads, kv_heads = _local_heads(spec, tp)
    if part in (Part.EMBED, Part.LM_HEAD):
        rows = vocab_rows(spec, tp)
        return 0, (tp_rank * rows, min((tp_rank + 1) * rows, spec.vocab_size)), 0
    if part in (Part.Q, Part.Q_BIAS):
        return 0, _rows(tp_rank * heads, heads, spec.head_dim), 0
    if part in (Part.K, Part.K_BIAS, Part.V, Part.V_BIAS):
        before = heads + (kv_heads if part in (Part.V, Part.V_BIAS) else 0)
        return 0, _rows(tp_rank * spec.num_kv_heads // tp, kv_heads, spec.head_dim), before * spec.head_dim
    if part in (Part.GATE, Part.UP):
        ffn = spec.ffn_size // tp
        return 0, _rows(tp_rank, 1, ffn), ffn if part is Part.UP else 0
    if part in (Part.ATTN_OUT, Part.DOWN):
        return 1, _rows(tp_rank, 1, tensor.shape[1] // tp), 0
    return 0, (0, tensor.shape[0]), 0


def _expert_cut(spec: ModelSpec, tensor: LogicalTensor, sizes: Sizes, tp_rank: int) -> tuple[int, Span, int]:
    """As `_cut`, of one expert's tensor; empty for an expert that another rank holds. The start is a row."""
    ep_rank, moe_tp_rank = sizes.moe_ranks(tp_rank)
    experts, ffn = spec.num_experts // sizes.ep, spec.moe_ffn_size // sizes.moe_tp
    local = tensor.expert - ep_rank * experts
    span = _rows(moe_tp_rank, 1, ffn) if 0 <= local < experts else (0, 0)
    if tensor.part is Part.EXPERT_DOWN:
        return 1, span, local * spec.hidden_size
    return 0, span, local * 2 * ffn + (ffn if tensor.part is Part.EXPERT_UP else 0)


def _rows(first: int, count: int, size: int) -> Span:
    return first * size, (first + count) * size
