"""One weight sync of any two layouts, studied in this process: planned and proved, with who sends what to whom."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from rlhf.config.parallel import ParallelConfig
from rlhf.errors import ConfigError, LayoutError
from rlhf.families.admissible import check_layout
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import megatron_layout
from rlhf.preflight.sizes import EngineSizes
from rlhf.reshard.check import Certificate, certify
from rlhf.reshard.layout import ITEM_BYTES, ModelLayout
from rlhf.reshard.plan import Plan, RankPlan, make_plan
from rlhf.reshard.topology import Fanout, Topology
from rlhf.rollout.native.layout import native_layout
from rlhf.rollout.sglang.layout import sglang_layout

ENGINES = ("sglang", "native")
"""Engines whose layouts are known here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """From a Megatron layout to engines."""

    model: str
    """As the user calls it."""
    spec: ModelSpec
    parallel: ParallelConfig
    engines: EngineSizes
    engine: str
    dtype: str
    fanout: Fanout
    gpus_per_node: int
    bucket_bytes: int
    """Staging is two buckets of at most so many."""

    @property
    def num_parameters(self) -> int:
        """Elements of the model, each counted once."""
        return sum(prod(one.shape) for one in logical_tensors(self.spec, head=Head.LM))

    @property
    def model_bytes(self) -> int:
        """Of the parameters."""
        return self.num_parameters * ITEM_BYTES[self.dtype]

    @property
    def topology(self) -> Topology:
        """Nodes of equal size from rank 0 to the last of either pool."""
        world = max(self.parallel.ranks.stop, self.engines.ranks.stop)
        return Topology.blocks(world, ranks_per_node=self.gpus_per_node)

    def layouts(self) -> tuple[ModelLayout, ModelLayout]:
        """(source, destination).

        Raises:
            LayoutError: A side cannot hold the model.
            ConfigError: The stages cannot hold the layers, or the engine is not known here.
        """
        check_layout(self.spec, self.parallel, where="--src")
        src = megatron_layout(self.spec, self.parallel, head=Head.LM, dtype=self.dtype)
        return src, _engine_layout(self)


def _engine_layout(of: Transition) -> ModelLayout:
    sizes, dtype = of.engines, of.dtype
    if of.engine not in ENGINES:
        raise ConfigError(f"--engine: the layout of {of.engine!r} is not known; needs one of {', '.join(ENGINES)}")
    if sizes.ep > 1 and of.engine == "native":
        raise ConfigError(f"--dst: ep{sizes.ep} for the native engine, which has no expert axis; leave ep out")
    at = {"dp": sizes.dp, "first_rank": sizes.first_rank, "stride": sizes.stride}
    try:
        if of.engine == "native":
            return native_layout(of.spec, tp=sizes.tp, **at, dtype=dtype)
        return sglang_layout(of.spec, tp=sizes.tp, ep=sizes.ep, **at, dtype=dtype)
    except LayoutError as error:
        raise LayoutError(str(error).replace("rollout.", "--dst.")) from error


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a transition comes to. Bytes everywhere."""

    transition: Transition
    certificate: Certificate
    ranks: tuple[int, ...]
    """Of either pool, ascending."""
    moved: npt.NDArray[np.int64]
    """[senders, receivers], in the order of `ranks`; copies inside a rank on the diagonal."""
    engine_shard: int
    """Of the rank whose engine holds most."""
    training_shard: int
    """Of the largest of the ranks that are in both pools; 0 when none is."""
    seconds: float
    """That planning and proof took here."""

    @cached_property
    def staging(self) -> int:
        """At most so much beside the parameters: two buckets, or all that a rank sends and receives if that is less."""
        between = self.moved.copy()
        np.fill_diagonal(between, 0)
        busiest = int((between.sum(axis=0) + between.sum(axis=1)).max())
        return min(2 * self.transition.bucket_bytes, busiest)


def study(transition: Transition) -> Study:
    """Plan and prove the whole transfer, every rank of it. No process group.

    Raises:
        LayoutError, ConfigError: See `Transition.layouts`.
    """
    start = time.perf_counter()
    with _no_search_for_cycles():
        src, dst = transition.layouts()
        plan = make_plan(src, dst, transition.topology, fanout=transition.fanout)
        parts = [plan.of(rank) for rank in plan.ranks]
        certificate = certify(plan, parts)
    both = set(src.ranks) & set(dst.ranks)
    return Study(
        transition=transition,
        certificate=certificate,
        ranks=plan.ranks,
        moved=_matrix(plan, parts),
        engine_shard=_largest_shard(dst, dst.ranks),
        training_shard=_largest_shard(src, tuple(both)),
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Plans are millions of small objects without a cycle, which Python would search again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _matrix(plan: Plan, parts: list[RankPlan]) -> npt.NDArray[np.int64]:
    at = {rank: place for place, rank in enumerate(plan.ranks)}
    moved = np.zeros((len(at), len(at)), dtype=np.int64)
    for column, part in enumerate(parts):
        into: dict[int, int] = {}
        for move in (*part.copies, *part.receives):
            into[move.src_rank] = into.get(move.src_rank, 0) + move.box.num_elements
        for source, count in into.items():
            moved[at[source], column] += count
    return moved * plan.src.item_bytes


def _largest_shard(layout: ModelLayout, ranks: tuple[int, ...]) -> int:
    """Bytes of parameters without their padding."""
    sizes: dict[int, int] = {}
    for rank in ranks:
        held = layout.holdings(rank)
        if id(held) not in sizes:
            sizes[id(held)] = sum(one.box.num_elements for one in held)
    return max(sizes.values(), default=0) * layout.item_bytes
