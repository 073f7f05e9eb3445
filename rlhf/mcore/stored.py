"""Where weights lie in Megatron-Core's distributed checkpoints: keys, whole shapes, boxes. Pure data.

A stored tensor is a parameter of the model on one rank (tp = pp = 1), with the layers of the decoder stacked along a
first dim, experts along a second: `decoder.layers.self_attention.linear_qkv.weight` is [layers, rows of q, k and v,
hidden]. Keys are those of Megatron's Transformer Engine layers; `other_key` is what its local layers call the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from rlhf.config.parallel import ParallelConfig
from rlhf.families.admissible import check_cuts, check_layout
from rlhf.families.spec import Head, LogicalTensor, ModelSpec, Part
from rlhf.mcore.groups import expert_grid, model_grid
from rlhf.mcore.layout import (
    EMBEDDING,
    OUTPUT,
    PARAM_OF_PART,
    Piece,
    held_pieces,
    param_shapes,
    params_of_stage,
    vocab_rows,
)
from rlhf.mcore.layout import EXPERTS as PARAM_EXPERTS
from rlhf.reshard.layout import Box

DECODER = "decoder.layers."
EXPERTS = "mlp.experts.experts."

VOCABULARY_KEYS = (EMBEDDING, OUTPUT)
"""Stored tensors whose rows may be more than the vocabulary has: Megatron pads it. Ours have no padding."""

_MLP_NORM = "pre_mlp_layernorm.weight"
_NORM_KEYS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    _MLP_NORM: "mlp.linear_fc1.layer_norm_weight",
}
"""Name inside a layer -> stored key inside it, where Transformer Engine holds a norm in the linear layer after it."""

_EXTRA_STATE = "._extra_state/shard_{at}_{of}"
"""What follows a module's key in that of its extra state: indices of layer and expert, and how many there are."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One block of a tensor, and where it lies in a stored one."""

    tensor: str
    """Logical name; or a rank's parameter, where that is what the pieces are of."""
    box: Box
    """In that tensor's indices."""
    key: str
    lead: tuple[int, ...]
    """Indices along the stored tensor's first dims: (), (layer,) or (layer, expert)."""
    start: tuple[int, ...]
    """Of the block's first element along its other dims."""

    def stored_box(self, box: Box) -> Box:
        """Where a block of the tensor (inside self.box) lies in the stored one."""
        moved = box.shift(tuple(at - start for at, (start, _) in zip(self.start, self.box.spans, strict=True)))
        return Box((*((at, at + 1) for at in self.lead), *moved.spans))


def stored_shapes(spec: ModelSpec, *, head: Head, layers_apart: bool = False) -> Mapping[str, tuple[int, ...]]:
    """Shape of each stored tensor of a model by key, in the order of the forward pass; the vocabulary without padding.

    A tied lm head is the embedding and not listed; a value head is `output_layer.weight` [1, hidden].

    Args:
        spec: The model.
        head: What stands on top of it.
        layers_apart: Each layer's tensors by themselves, `decoder.layers.3.mlp.linear_fc2.weight`: how Megatron stores
            models whose layers may differ (`moe_layer_freq` as a list is enough). We write no such folder.
    """
    one, shapes = ParallelConfig(), {}
    listed = spec if layers_apart else replace(spec, num_layers=1)  # a save asks: 2 s for 94 layers of 128 experts
    params = param_shapes(listed, one, head=head, stage=0)
    for tensor, param in params_of_stage(listed, one, head, 0):
        stacked = (spec.num_layers, spec.num_experts)[: len(_lead(tensor))]
        key = _key(spec, tensor, layers_apart=layers_apart)
        shapes[key] = (*(stacked[1:] if layers_apart else stacked), *params[param])
    return shapes


def stored_pieces(spec: ModelSpec, *, head: Head, layers_apart: bool = False) -> tuple[StoredPiece, ...]:
    """Where each logical tensor lies in the stored ones, as `stored_shapes`: each element of either is in one piece.

    A q, k or v weight is a piece for each KV head, for q, k and v of a head follow each other.
    """
    return tuple(
        StoredPiece(
            piece.tensor,
            piece.box,
            _key(spec, tensor, layers_apart=layers_apart),
            _lead(tensor)[1 if layers_apart else 0 :],
            piece.param_start,
        )
        for tensor, param in params_of_stage(spec, ParallelConfig(), head, 0)
        for piece in held_pieces(spec, tensor, param, 1, 0)
    )


def other_key(key: str) -> str:
    """What Megatron's local layers call a stored tensor: the same, but for the norm before a layer's experts."""
    return key.replace(_MLP_NORM, _NORM_KEYS[_MLP_NORM])


def extra_state_keys(spec: ModelSpec) -> tuple[str, ...]:
    """Objects without content that Megatron's modules look for beside tensors, by default in vain an error.

    Each is stored as `torch.save([None])`. They are scales of fp8 where a model has any; which modules ask depends on
    the version of Transformer Engine, so these are all that may (a checkpoint may have more than is asked for).
    """
    of_layers = ["self_attention.core_attention", "self_attention.linear_qkv", "self_attention.linear_proj"]
    if spec.qk_norm:
        of_layers += ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    stacked: dict[tuple[int, ...], list[str]] = {(spec.num_layers,): of_layers}
    if spec.num_experts:
        of_layers += ["pre_mlp_layernorm"]
        stacked[(spec.num_layers, spec.num_experts)] = [f"{EXPERTS}linear_fc1", f"{EXPERTS}linear_fc2"]
    else:
        of_layers += ["mlp.linear_fc1", "mlp.linear_fc2"]
    keys = ["decoder.final_layernorm" + _EXTRA_STATE.format(at=0, of=1)]
    for counts, modules in stacked.items():
        of = ".".join(map(str, counts))
        for at in product(*map(range, counts)):
            place = _EXTRA_STATE.format(at=".".join(map(str, at)), of=of)
            keys += [f"{DECODER}{module}{place}" for module in modules]
    return tuple(keys)


def held_of_stored(
    spec: ModelSpec,
    parallel: ParallelConfig,
    *,
    head: Head,
    rank: int,
    without_replicas: bool = False,
    for_files: bool = False,
) -> tuple[StoredPiece, ...]:
    """Where each parameter of a rank lies in the stored tensors; `tensor` and `box` are of the rank's parameter.

    Parameters go by `local_params`' names. Rows of padding are in no piece; the tied head of the last of several stages
    lies where the embedding does.

    Args:
        spec: The model.
        parallel: Its layout.
        head: What stands on top of it.
        rank: One of the pool.
        without_replicas: Leave out what a rank of a lower tp coordinate or of an earlier stage holds too, so that the
            ranks that differ in tp and pp, or of experts in tp, pp, etp and ep, hold each element once.
        for_files: No model is built: tp need not divide the number of heads.

    Raises:
        LayoutError: The layout cannot hold the model.
        ConfigError: The pipeline stages cannot hold the layers.
    """
    (check_cuts if for_files else check_layout)(spec, parallel, where="parallel")
    at, experts = model_grid(parallel).coords(rank), expert_grid(parallel)
    among = experts.coords(at["tp"] + parallel.tp * at["dp"])
    shapes = param_shapes(spec, parallel, head=head, stage=at["pp"])
    found: dict[str, list[StoredPiece]] = {}
    for tensor, param in params_of_stage(spec, parallel, head, at["pp"]):
        is_expert = tensor.expert >= 0
        tp, tp_rank = (parallel.etp, among["etp"]) if is_expert else (parallel.tp, at["tp"])
        if param in found or (is_expert and tensor.expert * parallel.ep // spec.num_experts != among["ep"]):
            continue
        cut = _cut(spec, tensor, tp, tp_rank)
        is_replica = (cut is None and tp_rank > 0) or (tensor.part is Part.EMBED and param == OUTPUT)
        if not (is_replica and without_replicas):
            found[param] = _runs(tensor, param, shapes[param], cut, _key(spec, tensor))
    return tuple(piece for pieces in found.values() for piece in pieces)


_Cut = tuple[int, list[Piece]]
"""A dim, and for runs of indices of a stored tensor along it where they start in the parameter."""


def _cut(spec: ModelSpec, tensor: LogicalTensor, tp: int, tp_rank: int) -> _Cut | None:
    """How ranks share the parameter that holds a tensor; None: each holds it whole."""
    part = tensor.part
    if part in (Part.EMBED, Part.LM_HEAD):
        return 0, vocab_rows(spec, tp, tp_rank)
    if part in (Part.Q, Part.K, Part.V, Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS):
        rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim // tp
        return 0, [((tp_rank * rows, (tp_rank + 1) * rows), 0)]
    if part in (Part.ATTN_OUT, Part.DOWN, Part.EXPERT_DOWN):
        columns = tensor.shape[1] // tp
        return 1, [((tp_rank * columns, (tp_rank + 1) * columns), 0)]
    if part in (Part.GATE, Part.UP, Part.EXPERT_GATE, Part.EXPERT_UP):
        whole, rows = tensor.shape[0], tensor.shape[0] // tp
        first = tp_rank * rows
        return 0, [((first, first + rows), 0), ((whole + first, whole + first + rows), rows)]
    return None


def _runs(tensor: LogicalTensor, param: str, shape: tuple[int, ...], cut: _Cut | None, key: str) -> list[StoredPiece]:
    dim, pieces = cut or (0, [((0, shape[0]), 0)])
    found = []
    for (start, stop), at in pieces:
        spans, stored = [(0, extent) for extent in shape], [0] * len(shape)
        spans[dim], stored[dim] = (at, at + stop - start), start
        found.append(StoredPiece(param, Box(tuple(spans)), key, _lead(tensor), tuple(stored)))
    return found


def _key(spec: ModelSpec, tensor: LogicalTensor, *, layers_apart: bool = False) -> str:
    name = PARAM_OF_PART[tensor.part]
    if tensor.layer < 0:
        return name
    before = f"{DECODER}{tensor.layer}." if layers_apart else DECODER
    if tensor.expert >= 0:
        return before + name.replace(PARAM_EXPERTS + "{expert}.", EXPERTS)
    if tensor.part is Part.MLP_NORM and spec.num_experts:  # Transformer Engine's layers fuse it into no router
        return before + name
    return before + _NORM_KEYS.get(name, name)


def _lead(tensor: LogicalTensor) -> tuple[int, ...]:
    return tuple(at for at in (tensor.layer, tensor.expert) if at >= 0)
