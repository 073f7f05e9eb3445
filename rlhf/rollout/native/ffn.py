"""The feed-forward part of a layer: one gated MLP for every token, or experts that a router picks for each.

Legend: H hidden, N rows (tokens, a multiple of ROW_STEP), F this rank's share of the FFN, E experts, k experts a token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.families.spec import ModelSpec
from rlhf.rollout.native.linear import ROW_STEP, Linear


class Ffn:
    """Gated MLP, this rank's part of the sum over the engine's ranks."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """`gate_up` [2 F, H], gate above up; `down` [H, F]."""
        self._gate_up, self._down = Linear(gate_up), Linear(down)

    def linears(self) -> Iterator[Linear]:
        """What `pack` copies."""
        yield from (self._gate_up, self._down)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, H]."""
        gate, up = self._gate_up(hidden).chunk(2, 1)
        return self._down(functional.silu(gate).mul_(up))


class Experts:
    """Router and all experts, this rank's part of the sum over the engine's ranks; every rank picks the same experts.

    A row's result depends, to the bit, on that row alone: an expert's rows are padded to a multiple of ROW_STEP, and a
    row adds up its experts in the order of their numbers.
    """

    def __init__(self, spec: ModelSpec, router: Tensor, gate_up: Tensor, down: Tensor) -> None:
        """`router` [E, H]; `gate_up` [E 2 F, H] and `down` [E H, F], each expert's as in `Ffn`."""
        self._per_token, self._divide = spec.experts_per_token, spec.norm_topk_prob
        self._router_weight, self._router = router, Linear(router)
        shares = (tensor.chunk(spec.num_experts) for tensor in (gate_up, down))
        self._experts = [Ffn(*share) for share in zip(*shares, strict=True)]

    def linears(self) -> Iterator[Linear]:
        """What `pack` copies."""
        yield self._router
        for expert in self._experts:
            yield from expert.linears()

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, H], summed in float32."""
        weights, chosen = self._route(hidden)
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for number in chosen.unique().tolist():
            rows, place = (chosen == number).nonzero(as_tuple=True)
            mine = functional.pad(hidden[rows], (0, 0, 0, -len(rows) % ROW_STEP))
            found = self._experts[number](mine)[: len(rows)]
            total.index_add_(0, rows, found * weights[rows, place].unsqueeze(1))
        return total.to(hidden.dtype)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(weights in float32, numbers of the experts), both [N, k]."""
        if hidden.dtype is torch.float32:
            logits = self._router(hidden)
        else:
            logits = functional.linear(hidden.float(), self._router_weight.float())
        weights, chosen = logits.softmax(-1).topk(self._per_token, -1)
        return weights / weights.sum(-1, keepdim=True) if self._divide else weights, chosen
