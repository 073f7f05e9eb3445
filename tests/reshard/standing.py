"""What the ranks of the tests of a standing transfer do: many syncs over one plan, between steps and offloads."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf.dist.groups import GroupFactory
from rlhf.errors import LayoutError, WeightSyncError
from rlhf.metrics.timers import Kind
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.routes import RouteCache
from rlhf.reshard.topology import Fanout, Link, Topology
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync
from tests.reshard.toy import brute_force_bound, brute_force_far, empty_params, filled_params, full_tensors

Params = dict[str, torch.Tensor]
POISON = -7.0


def expected(layout: ModelLayout, full: Params, *, poisoned: Collection[str] = ()) -> Params:
    """What this rank's destination parameters hold after a transfer of `full`."""
    params = empty_params(layout, dist.get_rank(), fill=POISON)
    for one in layout.holdings(dist.get_rank()) if dist.get_rank() in layout.ranks else ():
        if one.tensor not in poisoned:
            params[one.param][one.param_box(one.box).slices] = full[one.tensor][one.box.slices]
    return params


def check_equal(found: Params, wanted: Params) -> None:
    assert found.keys() == wanted.keys()
    for name, param in wanted.items():
        assert torch.equal(found[name], param), name


def poison(params: Params) -> None:
    for param in params.values():
        param.fill_(POISON)


def optimizer_step(layout: ModelLayout, params: Params, full: Params, *, only: Collection[str]) -> None:
    """Change some tensors in place, on every rank that holds them, and in the reference."""
    for name in only:
        full[name].mul_(-3).add_(1)
    for one in layout.holdings(dist.get_rank()) if dist.get_rank() in layout.ranks else ():
        if one.tensor in only:
            params[one.param][one.param_box(one.box).slices].mul_(-3).add_(1)


def offload(params: Params) -> Params:
    """The weights leave their memory and come back in another place."""
    away = {name: param.clone() for name, param in params.items()}
    for param in params.values():
        param.untyped_storage().resize_(0)
    return {name: param.clone() for name, param in away.items()}


def standing(world: int, src: ModelLayout, dst: ModelLayout, back: ModelLayout) -> None:
    """Trainer -> engines -> another training layout, and there directly; each equals a fresh plan and brute force."""
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    everyone = factory.cpu_group([tuple(range(world))])
    topology, cache = Topology.blocks(world, ranks_per_node=4), RouteCache()

    def sync(a: ModelLayout, b: ModelLayout, fanout: Fanout, kept: RouteCache | None) -> WeightSync:
        return WeightSync(a, b, topology=topology, group=everyone, bucket_bytes=3000, fanout=fanout, cache=kept)

    for fanout in Fanout:
        there, again, over = (sync(*pair, fanout, cache) for pair in ((src, dst), (dst, back), (src, back)))
        full = full_tensors(src.tensors)
        params, landed = filled_params(src, dist.get_rank(), full), expected(dst, full, poisoned=dst.tensors)
        returned = expected(back, full, poisoned=back.tensors)
        for number in range(3):
            poison(landed)
            poison(returned)
            stats = there.update_weights(params, landed)
            check_equal(landed, expected(dst, full))
            check_bytes(stats, src, dst, topology, fanout)
            assert 0 < stats.far_bound < stats.bound
            assert stats.staged_bytes > 0
            check_bytes(again.update_weights(landed, returned), dst, back, topology, fanout)
            check_equal(returned, expected(back, full))
            poison(returned)
            check_bytes(over.update_weights(params, returned), src, back, topology, fanout)
            check_equal(returned, expected(back, full))
            fresh = expected(dst, full, poisoned=dst.tensors)
            sync(src, dst, fanout, None).update_weights(params, fresh)
            check_equal(fresh, landed)
            optimizer_step(src, params, full, only=list(src.tensors))
            if number != 1:
                params, landed = offload(params), offload(landed)
    assert cache.num_pairs == 6
    sync(as_other_objects(src), dst, Fanout.DIRECT, cache)
    assert cache.num_pairs == 6
    incremental(src, dst, lambda **kept: WeightSync(src, dst, topology=topology, group=everyone, **kept))
    refused_before_a_byte_moves(src, dst, sync(src, dst, Fanout.DIRECT, None))


def check_bytes(stats, src: ModelLayout, dst: ModelLayout, topology: Topology, fanout: Fanout) -> None:
    far = 4 * brute_force_far(src, dst, topology.nodes, once=fanout is Fanout.NODE)
    assert stats.moved == stats.bound == 4 * sum(brute_force_bound(src, dst).values())
    assert stats.received[Link.ACROSS_NODES] == stats.far_bound == far
    assert stats.ratio == stats.far_ratio == 1.0
    assert stats.staged_bytes <= stats.staging_bytes <= 2 * 3000
    worst = max(brute_force_bound(src, dst).items(), key=lambda found: found[1])
    assert stats.most_received == 4 * worst[1]
    assert stats.num_tensors == len(src.tensors)


def as_other_objects(layout: ModelLayout) -> ModelLayout:
    return ModelLayout(
        dict(layout.tensors), layout.dtype, layout.ranks, lambda rank: tuple(list(layout.holdings(rank)))
    )


def incremental(src: ModelLayout, dst: ModelLayout, make: Callable[..., WeightSync]) -> None:
    """Only what changed is sent; all after `forget` on one rank; a changed tensor that is not named shows."""
    full, rank = full_tensors(src.tensors), dist.get_rank()
    params, landed = filled_params(src, rank, full), expected(dst, full, poisoned=dst.tensors)
    names = list(src.tensors)
    trained, frozen = names[::2], names[1::2]
    sync = make(verify=Verify.NONE)
    all_bytes = 4 * sum(brute_force_bound(src, dst).values())
    assert sync.update_weights(params, landed, changed=trained).moved == all_bytes  # the first is complete
    few = ModelLayout(
        {name: src.tensors[name] for name in trained},
        src.dtype,
        src.ranks,
        lambda of: tuple(one for one in src.holdings(of) if one.tensor in trained),
    )
    some_bytes = 4 * sum(brute_force_bound(few, wanted_only(dst, trained)).values())
    assert 0 < some_bytes < all_bytes
    for _ in range(2):
        optimizer_step(src, params, full, only=trained)
        poison(landed)
        stats = sync.update_weights(params, landed, changed=trained)
        assert (stats.moved, stats.bound, stats.num_tensors) == (some_bytes, some_bytes, len(trained))
        check_equal(landed, expected(dst, full, poisoned=frozen))
    assert sync.update_weights(params, landed, changed=()).moved == 0
    if rank == dst.ranks[-1]:
        sync.forget()
    assert sync.update_weights(params, landed, changed=trained).moved == all_bytes
    check_equal(landed, expected(dst, full))
    assert sync.update_weights(params, landed, changed=trained).moved == some_bytes
    with pytest.raises(WeightSyncError, match="name different changed tensors; nothing was moved"):
        sync.update_weights(params, landed, changed=trained if rank else frozen)

    careful = make(verify=Verify.ALL)
    careful.update_weights(params, landed)
    optimizer_step(src, params, full, only=[*trained, frozen[0]])
    with pytest.raises(WeightSyncError, match=frozen[0]):
        careful.update_weights(params, landed, changed=trained)
    assert careful.update_weights(params, landed, changed=trained).moved == all_bytes  # complete after a failure


def wanted_only(layout: ModelLayout, tensors: Collection[str]) -> ModelLayout:
    return ModelLayout(
        {name: layout.tensors[name] for name in tensors},
        layout.dtype,
        layout.ranks,
        lambda rank: tuple(one for one in layout.holdings(rank) if one.tensor in tensors),
    )


def refused_before_a_byte_moves(src: ModelLayout, dst: ModelLayout, sync: WeightSync) -> None:
    """A parameter that is missing, too small or of another dtype on one rank: named there, refused everywhere."""
    full, rank = full_tensors(src.tensors), dist.get_rank()
    params, landed = filled_params(src, rank, full), expected(dst, full, poisoned=dst.tensors)
    victim, name = src.ranks[1], next(iter(params))
    for break_it, named in (
        (lambda p: p.pop(name), f"no parameter {name}"),
        (lambda p: p.update({name: p[name][:-1]}), f"{name} has shape"),
        (lambda p: p.update({name: p[name].double()}), f"{name} is torch.float64"),
    ):
        broken = dict(params)
        if rank == victim:
            break_it(broken)
        error = LayoutError if rank == victim else WeightSyncError
        with pytest.raises(error, match=named if rank == victim else f"rank {victim} refuses its parameters"):
            sync.update_weights(broken, landed)
        assert all((param == POISON).all() for param in landed.values())
    with pytest.raises(LayoutError if rank == victim else WeightSyncError, match=r"changed tensor ghost|refuses"):
        sync.update_weights(params, landed, changed=["ghost"] if rank == victim else [])
    sync.update_weights(params, landed)
    check_equal(landed, expected(dst, full))


def claims(world: int, src: ModelLayout, dst: ModelLayout, bystanders: tuple[int, ...]) -> None:
    """Ranks outside both pools call nothing; what is contiguous is not copied; buckets overlap; memory is bounded."""
    pools = tuple(rank for rank in range(world) if rank not in bystanders)
    group = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60)).cpu_group([pools])
    if group is None:
        return  # neither makes a sync nor takes part in one: the others do not wait for it
    topology, full, seen = Topology.blocks(world, ranks_per_node=world), full_tensors(src.tensors), []

    @contextmanager
    def span(name: str, kind: Kind = Kind.WORK) -> Iterator[None]:
        seen.append(("enter", name))
        yield
        seen.append(("leave", name))

    bucket = 4096
    assert max(torch.Size(shape).numel() * 4 for shape in src.tensors.values()) > 2 * bucket
    sync = WeightSync(src, dst, topology=topology, group=group, bucket_bytes=bucket, verify=Verify.NONE, span=span)
    params = filled_params(src, dist.get_rank(), full)
    landed = expected(dst, full, poisoned=dst.tensors)
    seen.clear()
    stats = sync.update_weights(params, landed)
    check_equal(landed, expected(dst, full))
    assert stats.staged_bytes <= stats.staging_bytes <= 2 * bucket
    buckets = sum(one == "enter" and name.startswith("post bucket") for one, name in seen)
    assert buckets > 3
    for number in range(buckets - 1):  # the next one is on its way before this one is waited for and unpacked
        assert seen.index(("leave", f"post bucket {number + 1}")) < seen.index(("enter", f"bucket {number}"))
        assert seen.index(("leave", f"post bucket {number}")) < seen.index(("enter", f"unpack bucket {number}"))
