"""Where each logical tensor lies in the parameters of Megatron's ranks: a pure function of spec and layout.

Holds for both layer specs: parameters go by the names of the local one. Shape of a fused parameter on one rank:
linear_qkv is the rank's even share of the rows of, for each KV head, the query heads that share it, then its key, then
its value; linear_fc1 is the rank's slice of gate above its slice of up; so is each expert's, cut over etp instead of
tp. Local expert i of ep rank r is expert r * experts / ep + i. A stage's layers are numbered from 0 through all its
model chunks.
"""

import re
from bisect import bisect_right
from collections.abc import Set
from functools import cache
from itertools import accumulate

from rlhf.config.parallel import ParallelConfig
from rlhf.families.admissible import check_layout
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, LogicalTensor, ModelSpec, Part
from rlhf.mcore.groups import expert_grid, model_grid
from rlhf.mcore.param_names import LAYER_NUMBER
from rlhf.mcore.transformer_config import padded_vocab_size
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout, Span

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

EXPERTS = "mlp.experts.local_experts."
"""In the name of each parameter of an expert."""
_EXPERT = EXPERTS + "{expert}."

PARAM_OF_PART = {
    Part.EMBED: EMBEDDING,
    Part.ATTN_NORM: "input_layernorm.weight",
    Part.Q: "self_attention.linear_qkv.weight",
    Part.K: "self_attention.linear_qkv.weight",
    Part.V: "self_attention.linear_qkv.weight",
    Part.Q_BIAS: "self_attention.linear_qkv.bias",
    Part.K_BIAS: "self_attention.linear_qkv.bias",
    Part.V_BIAS: "self_attention.linear_qkv.bias",
    Part.ATTN_OUT: "self_attention.linear_proj.weight",
    Part.Q_NORM: "self_attention.q_layernorm.weight",
    Part.K_NORM: "self_attention.k_layernorm.weight",
    Part.MLP_NORM: "pre_mlp_layernorm.weight",
    Part.GATE: "mlp.linear_fc1.weight",
    Part.UP: "mlp.linear_fc1.weight",
    Part.DOWN: "mlp.linear_fc2.weight",
    Part.ROUTER: "mlp.router.weight",
    Part.EXPERT_GATE: _EXPERT + "linear_fc1.weight",
    Part.EXPERT_UP: _EXPERT + "linear_fc1.weight",
    Part.EXPERT_DOWN: _EXPERT + "linear_fc2.weight",
    Part.FINAL_NORM: "decoder.final_layernorm.weight",
    Part.LM_HEAD: OUTPUT,
    Part.VALUE_HEAD: OUTPUT,
}
"""Megatron's name of the parameter that holds a part; in a layer, the name inside it."""

_INSIDE_LAYER = re.compile(r"^decoder\.layers\.\d+\.(mlp\.experts\.local_experts\.\d+\.)?")

Piece = tuple[Span, int]
"""Indices of a logical tensor along the cut dim, and where they start in the parameter along it."""


def _even(extent: int, tp: int, tp_rank: int) -> list[Piece]:
    size = extent // tp
    return [((tp_rank * size, (tp_rank + 1) * size), 0)]


def vocab_rows(spec: ModelSpec, tp: int, tp_rank: int) -> list[Piece]:
    """Rows of a vocabulary that is padded at its end; padding belongs to no box."""
    rows = padded_vocab_size(spec.vocab_size, tp) // tp
    start, stop = tp_rank * rows, min((tp_rank + 1) * rows, spec.vocab_size)
    return [((start, stop), 0)] if start < stop else []


def _qkv(spec: ModelSpec, part: Part, tp: int, tp_rank: int) -> list[Piece]:
    """Rows of q, k or v in the fused projection, which is cut evenly: a piece for each KV head that a rank has part of.

    Where tp exceeds the number of KV heads, the cut goes through a group: a rank may hold some of its rows of q, or the
    end of q and k, or a part of v.
    """
    dim, queries = spec.head_dim, spec.num_heads // spec.num_kv_heads
    before, size = {
        Part.Q: (0, queries * dim),
        Part.K: (queries * dim, dim),
        Part.V: ((queries + 1) * dim, dim),
    }[_MATRIX_OF.get(part, part)]
    group = (queries + 2) * dim
    rows = spec.num_kv_heads * group // tp
    first, end = tp_rank * rows, (tp_rank + 1) * rows
    pieces = []
    for head in range(first // group, -(-end // group)):
        start = head * group + before
        low, high = max(first, start), min(end, start + size)
        if low < high:
            in_part = head * size - start
            pieces.append(((low + in_part, high + in_part), low - first))
    return pieces


_MATRIX_OF = {Part.Q_BIAS: Part.Q, Part.K_BIAS: Part.K, Part.V_BIAS: Part.V}


def _pieces(spec: ModelSpec, tensor: LogicalTensor, tp: int, tp_rank: int) -> tuple[int, list[Piece]]:
    """The dim along which tensor-parallel ranks share a tensor, and this rank's pieces of it."""
    part = tensor.part
    if part in (Part.EMBED, Part.LM_HEAD):
        return 0, vocab_rows(spec, tp, tp_rank)
    if part in (Part.Q, Part.K, Part.V, *_MATRIX_OF):
        return 0, _qkv(spec, part, tp, tp_rank)
    if part in (Part.ATTN_OUT, Part.DOWN, Part.EXPERT_DOWN):
        return 1, _even(tensor.shape[1], tp, tp_rank)
    if part in (Part.GATE, Part.UP, Part.EXPERT_GATE, Part.EXPERT_UP):
        ((span, _),) = _even(tensor.shape[0], tp, tp_rank)
        return 0, [(span, 0 if part in (Part.GATE, Part.EXPERT_GATE) else tensor.shape[0] // tp)]
    return 0, [((0, tensor.shape[0]), 0)]


def held_pieces(spec: ModelSpec, tensor: LogicalTensor, param: str, tp: int, tp_rank: int) -> list[ParamLayout]:
    """What one of the ranks that share a tensor holds of it; `tp` counts them, of an expert it is etp."""
    dim, pieces = _pieces(spec, tensor, tp, tp_rank)
    whole = [(0, extent) for extent in tensor.shape]
    held = []
    for span, at in pieces:
        spans, start = list(whole), [0] * len(whole)
        spans[dim], start[dim] = span, at
        held.append(ParamLayout(tensor.name, Box(tuple(spans)), param, tuple(start)))
    return held


def _layers_of(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> list[int]:
    """Numbers of the layers that a pipeline stage holds, chunk after chunk; its parameters count them from 0."""
    ends = list(accumulate(parallel.chunk_layers(spec.num_layers, where="parallel"), initial=0))
    return [layer for chunk in parallel.chunks_of(stage) for layer in range(ends[chunk], ends[chunk + 1])]


def params_of_stage(
    spec: ModelSpec, parallel: ParallelConfig, head: Head, stage: int
) -> list[tuple[LogicalTensor, str]]:
    """The tensors of a pipeline stage, experts of all ep ranks, and the parameters that hold them."""
    place = {layer: local for local, layer in enumerate(_layers_of(spec, parallel, stage))}
    is_last = stage == parallel.pp - 1
    found = []
    for tensor in logical_tensors(spec, head=head):
        name = PARAM_OF_PART[tensor.part]
        if tensor.layer >= 0:
            if tensor.layer in place:
                name = name.format(expert=tensor.expert % max(1, spec.num_experts // parallel.ep))
                found.append((tensor, f"decoder.layers.{place[tensor.layer]}.{name}"))
        elif tensor.part is Part.EMBED:
            if stage == 0:
                found.append((tensor, EMBEDDING))
            elif is_last and spec.tied_embeddings and head is Head.LM:
                found.append((tensor, OUTPUT))
        elif is_last:
            found.append((tensor, name))
    return found


def _chunk_of(param: str, spec: ModelSpec, parallel: ParallelConfig, stage: int) -> int:
    """Which of a stage's chunks holds a parameter."""
    if (numbered := LAYER_NUMBER.match(param)) is None:
        return 0 if param == EMBEDDING else parallel.vpp - 1
    return bisect_right(layers_before(spec, parallel, stage), int(numbered[2])) - 1


def param_shapes(
    spec: ModelSpec, parallel: ParallelConfig, *, head: Head, stage: int, chunk: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of any rank of a pipeline stage, or of one of its chunks, by `local_params`' names."""
    tp, hidden, head_dim = parallel.tp, spec.hidden_size, spec.head_dim
    queries, ffn = spec.num_heads * head_dim // tp, spec.ffn_size // tp
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * head_dim // tp
    head_rows = 1 if head is Head.VALUE else padded_vocab_size(spec.vocab_size, tp) // tp
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (padded_vocab_size(spec.vocab_size, tp) // tp, hidden),
        OUTPUT: (head_rows, hidden),
        "self_attention.linear_qkv.weight": (qkv, hidden),
        "self_attention.linear_qkv.bias": (qkv,),
        "self_attention.linear_proj.weight": (hidden, queries),
        "self_attention.q_layernorm.weight": (head_dim,),
        "self_attention.k_layernorm.weight": (head_dim,),
        "mlp.linear_fc1.weight": (2 * ffn, hidden),
        "mlp.linear_fc2.weight": (hidden, ffn),
        "mlp.router.weight": (spec.num_experts, hidden),
        "linear_fc1.weight": (2 * spec.moe_ffn_size // parallel.etp, hidden),
        "linear_fc2.weight": (hidden, spec.moe_ffn_size // parallel.etp),
    }
    params = {param for _, param in params_of_stage(spec, parallel, head, stage)}
    if chunk is not None:
        params = {param for param in params if _chunk_of(param, spec, parallel, stage) == chunk}
    return {param: shapes.get(_INSIDE_LAYER.sub("", param), (hidden,)) for param in sorted(params)}


def frozen_params(
    spec: ModelSpec, parallel: ParallelConfig, *, head: Head, stage: int, frozen: Set[str]
) -> frozenset[str]:
    """Parameters of a pipeline stage, by the names of `local_params`, that hold frozen tensors.

    Args:
        spec: The model.
        parallel: Its layout.
        head: What stands on top of it.
        stage: The pipeline stage.
        frozen: Logical names, as `rlhf.families.frozen.frozen_tensors` gives them: whole parameters.
    """
    held = params_of_stage(spec, parallel, head, stage)
    stays = {param for tensor, param in held if tensor.name in frozen}
    mixed = stays & {param for tensor, param in held if tensor.name not in frozen}
    assert not mixed, f"{sorted(mixed)[0]} holds frozen tensors and others"
    return frozenset(stays)


def megatron_layout(spec: ModelSpec, parallel: ParallelConfig, *, head: Head, dtype: str) -> ModelLayout:
    """What each rank of a Megatron model's pool holds. Pure; no module, no process group.

    A tied embedding is one logical tensor, held by the first stage and again by the last. Parameters are named as in
    `local_params`.

    Raises:
        LayoutError: The layout cannot hold the model (tp that does not divide its heads, for one).
        ConfigError: The pipeline stages cannot hold the layers.
    """
    check_layout(spec, parallel, where="parallel")
    grid, experts = model_grid(parallel), expert_grid(parallel)
    tensors_of = cache(lambda stage: params_of_stage(spec, parallel, head, stage))

    @cache
    def shard(tp_rank: int, stage: int, etp_rank: int, ep_rank: int) -> tuple[ParamLayout, ...]:
        found = []
        for tensor, param in tensors_of(stage):
            if tensor.expert < 0:
                found += held_pieces(spec, tensor, param, parallel.tp, tp_rank)
            elif tensor.expert * parallel.ep // spec.num_experts == ep_rank:
                found += held_pieces(spec, tensor, param, parallel.etp, etp_rank)
        return tuple(found)

    def holdings(rank: int) -> tuple[ParamLayout, ...]:
        at = grid.coords(rank)
        among = experts.coords(at["tp"] + parallel.tp * at["dp"])
        return shard(at["tp"], at["pp"], among["etp"], among["ep"])

    return ModelLayout(
        tensors={tensor.name: tensor.shape for tensor in logical_tensors(spec, head=head)},
        dtype=dtype,
        ranks=tuple(grid.ranks),
        holdings=holdings,
    )


def layers_before(spec: ModelSpec, parallel: ParallelConfig, stage: int) -> tuple[int, ...]:
    """For each chunk of a pipeline stage, how many layers the chunks before it have."""
    counts = parallel.chunk_layers(spec.num_layers, where="parallel")
    return tuple(accumulate((counts[chunk] for chunk in parallel.chunks_of(stage)), initial=0))[:-1]
