"""A toy decoder cut in the ways that matter, and slow references that share no code with the planner.

Source: tensor, pipeline and data parallel, QKV fused and interleaved by KV group, gate and up fused, vocabulary padded,
embedding tied over the first and the last stage. Destination: engines that cut the heads, replicate KV heads when
there are more ranks than those, and pad nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from rlhf.reshard.layout import Box, ModelLayout, ParamLayout


@dataclass(frozen=True)
class Toy:
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        found = {"embed": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            found |= {
                f"{layer}.norm": (self.hidden,),
                f"{layer}.q": (self.heads * self.head_dim, self.hidden),
                f"{layer}.k": (self.kv_heads * self.head_dim, self.hidden),
                f"{layer}.v": (self.kv_heads * self.head_dim, self.hidden),
                f"{layer}.o": (self.hidden, self.heads * self.head_dim),
                f"{layer}.gate": (self.ffn, self.hidden),
                f"{layer}.up": (self.ffn, self.hidden),
                f"{layer}.down": (self.hidden, self.ffn),
            }
        return found | {"final_norm": (self.hidden,)}


def source(toy: Toy, *, tp: int, stages: tuple[int, ...], dp: int, first_rank: int = 0) -> ModelLayout:
    """Rank = first + t + tp * (stage + pp * replica); `stages` are layers per pipeline stage."""
    pp = len(stages)

    @cache
    def shard(t: int, stage: int) -> tuple[ParamLayout, ...]:
        found = []
        per = -(-toy.vocab // tp)
        rows = (t * per, min((t + 1) * per, toy.vocab))
        for name, here in (("first", stage == 0), ("last", stage == pp - 1 and pp > 1)):
            if here and rows[0] < rows[1]:
                found.append(ParamLayout("embed", Box.of(rows, (0, toy.hidden)), f"{name}.embed", (0, 0)))
        for layer in range(sum(stages[:stage]), sum(stages[: stage + 1])):
            found += source_layer(toy, layer, t, tp)
        if stage == pp - 1:
            found.append(ParamLayout("final_norm", Box.of((0, toy.hidden)), "final_norm", (0,)))
        return tuple(found)

    def holdings(rank: int) -> tuple[ParamLayout, ...]:
        at = (rank - first_rank) % (tp * pp)
        return shard(at % tp, at // tp)

    ranks = tuple(range(first_rank, first_rank + tp * pp * dp))
    return ModelLayout(toy.tensors(), "float32", ranks, holdings)


def source_layer(toy: Toy, layer: int, t: int, tp: int) -> list[ParamLayout]:
    every, d = (0, toy.hidden), toy.head_dim
    groups = toy.kv_heads // tp
    q_of_group = toy.heads // toy.kv_heads * d
    found = [ParamLayout(f"{layer}.norm", Box.of(every), f"{layer}.norm", (0,))]
    for number, group in enumerate(range(t * groups, (t + 1) * groups)):
        at = number * (q_of_group + 2 * d)
        q_rows = (group * q_of_group, (group + 1) * q_of_group)
        kv_rows = (group * d, (group + 1) * d)
        found.append(ParamLayout(f"{layer}.q", Box.of(q_rows, every), f"{layer}.qkv", (at, 0)))
        found.append(ParamLayout(f"{layer}.k", Box.of(kv_rows, every), f"{layer}.qkv", (at + q_of_group, 0)))
        found.append(ParamLayout(f"{layer}.v", Box.of(kv_rows, every), f"{layer}.qkv", (at + q_of_group + d, 0)))
    heads = (t * toy.heads // tp * d, (t + 1) * toy.heads // tp * d)
    ffn = (t * toy.ffn // tp, (t + 1) * toy.ffn // tp)
    found.append(ParamLayout(f"{layer}.o", Box.of(every, heads), f"{layer}.o", (0, 0)))
    found.append(ParamLayout(f"{layer}.gate", Box.of(ffn, every), f"{layer}.gate_up", (0, 0)))
    found.append(ParamLayout(f"{layer}.up", Box.of(ffn, every), f"{layer}.gate_up", (ffn[1] - ffn[0], 0)))
    found.append(ParamLayout(f"{layer}.down", Box.of(every, ffn), f"{layer}.down", (0, 0)))
    return found


def engine(toy: Toy, *, tp: int, dp: int, first_rank: int = 0, twice: bool = False) -> ModelLayout:
    """Rank = first + t + tp * engine. `twice`: the embedding is held a second time, as an output layer of its own."""

    @cache
    def shard(t: int) -> tuple[ParamLayout, ...]:
        every, d = (0, toy.hidden), toy.head_dim
        per = -(-toy.vocab // tp)
        rows = (min(t * per, toy.vocab), min((t + 1) * per, toy.vocab))
        names = ["embed", "head"] if twice else ["embed"]
        found = [ParamLayout("embed", Box.of(rows, every), name, (0, 0)) for name in names if rows[0] < rows[1]]
        heads = (t * toy.heads // tp * d, (t + 1) * toy.heads // tp * d)
        first, last = t * toy.kv_heads // tp, -(-(t + 1) * toy.kv_heads // tp)
        kv, ffn = (first * d, last * d), (t * toy.ffn // tp, (t + 1) * toy.ffn // tp)
        q_size, kv_size = heads[1] - heads[0], kv[1] - kv[0]
        for layer in range(toy.layers):
            found += [
                ParamLayout(f"{layer}.norm", Box.of(every), f"{layer}.norm", (0,)),
                ParamLayout(f"{layer}.q", Box.of(heads, every), f"{layer}.qkv", (0, 0)),
                ParamLayout(f"{layer}.k", Box.of(kv, every), f"{layer}.qkv", (q_size, 0)),
                ParamLayout(f"{layer}.v", Box.of(kv, every), f"{layer}.qkv", (q_size + kv_size, 0)),
                ParamLayout(f"{layer}.o", Box.of(every, heads), f"{layer}.o", (0, 0)),
                ParamLayout(f"{layer}.gate", Box.of(ffn, every), f"{layer}.gate", (0, 0)),
                ParamLayout(f"{layer}.up", Box.of(ffn, every), f"{layer}.up", (0, 0)),
                ParamLayout(f"{layer}.down", Box.of(every, ffn), f"{layer}.down", (0, 0)),
            ]
        return (*found, ParamLayout("final_norm", Box.of(every), "final_norm", (0,)))

    def holdings(rank: int) -> tuple[ParamLayout, ...]:
        return shard((rank - first_rank) % tp)

    return ModelLayout(toy.tensors(), "float32", tuple(range(first_rank, first_rank + tp * dp)), holdings)


def full_tensors(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Every element of the model has a value of its own (exact in fp32 below 2^24 elements)."""
    found, at = {}, 1
    for name, shape in tensors.items():
        size = torch.Size(shape).numel()
        found[name] = torch.arange(at, at + size, dtype=torch.float32).view(shape)
        at += size
    return found


def empty_params(layout: ModelLayout, rank: int, *, fill: float, padding: int = 0) -> dict[str, torch.Tensor]:
    """Local parameters large enough for what the rank holds, with `padding` more rows."""
    sizes: dict[str, list[int]] = {}
    for one in layout.holdings(rank) if rank in layout.ranks else ():
        place = one.param_box(one.box)
        size = sizes.setdefault(one.param, [0] * len(place.spans))
        sizes[one.param] = [max(old, stop) for old, (_, stop) in zip(size, place.spans, strict=True)]
    return {name: torch.full([size[0] + padding, *size[1:]], fill) for name, size in sizes.items()}


def filled_params(
    layout: ModelLayout, rank: int, full: Mapping[str, torch.Tensor], *, padding: int = 0
) -> dict[str, torch.Tensor]:
    """What the rank's parameters hold when the model's tensors are `full`; -1 where nothing lies."""
    params = empty_params(layout, rank, fill=-1.0, padding=padding)
    for one in layout.holdings(rank) if rank in layout.ranks else ():
        params[one.param][one.param_box(one.box).slices] = full[one.tensor][one.box.slices]
    return params


def assembled(layout: ModelLayout, params: Mapping[int, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors put together from all ranks' parameters; every rank that holds an element must agree on it."""
    full = {name: torch.full(shape, float("nan")) for name, shape in layout.tensors.items()}
    for rank in layout.ranks:
        for one in layout.holdings(rank):
            there = full[one.tensor][one.box.slices]
            here = params[rank][one.param][one.param_box(one.box).slices]
            assert (there.isnan() | (there == here)).all()
            there.copy_(here)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def elements(layout: ModelLayout, rank: int) -> set[tuple[str, int]]:
    """Every element that a rank holds, one by one."""
    found = set()
    for one in layout.holdings(rank) if rank in layout.ranks else ():
        ids = torch.arange(torch.Size(layout.tensors[one.tensor]).numel()).view(layout.tensors[one.tensor])
        found |= {(one.tensor, number) for number in ids[one.box.slices].flatten().tolist()}
    return found


def brute_force_bound(src: ModelLayout, dst: ModelLayout) -> dict[int, int]:
    """For each destination rank: how many distinct elements it wants and does not hold."""
    return {rank: len(elements(dst, rank) - elements(src, rank)) for rank in dst.ranks}


def brute_force_far(src: ModelLayout, dst: ModelLayout, nodes: tuple[int, ...], *, once: bool) -> int:
    """Elements that must come from other nodes: counted for each rank, or `once` for each node."""
    total = 0
    for node in set(nodes):
        there = [rank for rank, at in enumerate(nodes) if at == node]
        held = set().union(*(elements(src, rank) for rank in there))
        wanted = [elements(dst, rank) - held for rank in there]
        total += len(set().union(*wanted)) if once else sum(map(len, wanted))
    return total
