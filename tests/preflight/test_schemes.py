"""Formulas of other ways by numbers worked out by hand, by sets of shards, and by our plan where they must agree."""

from fractions import Fraction
from itertools import product

import pytest

from rlhf.config.parallel import ParallelConfig
from rlhf.families.published import find_published
from rlhf.preflight.link_time import Bandwidths, gather_seconds, slowest
from rlhf.preflight.schemes import Shares, deepspeed_chat, full_gather, hybridflow, schemes
from rlhf.preflight.sizes import EngineSizes
from rlhf.preflight.transition import Study, Transition, study
from rlhf.reshard.check import Certificate, RankTraffic
from rlhf.reshard.topology import Fanout, Link, Topology
from tests.mcore.stand_in import tiny_spec


def shares(volume: str, peak: str, redundant: str) -> Shares:
    return Shares(volume=Fraction(volume), peak=Fraction(peak), redundant=Fraction(redundant))


def test_formulas_by_hand():
    assert deepspeed_chat(2, 2, 2) == shares("7/8", "1", "1/8")
    assert deepspeed_chat(8, 4, 8) == shares("255/256", "1", "1/256")
    assert full_gather(8, 4) == shares("31/32", "1", "1/32")
    assert hybridflow(4, 1, 2) == shares("1/4", "1/2", "0")
    assert hybridflow(8, 4, 8) == shares("3/32", "1/8", "0")
    assert hybridflow(4, 2, 2, 2) == shares("1/8", "1/4", "0")
    assert hybridflow(8, 1, 8).volume == 0


@pytest.mark.parametrize(("t", "p", "tg"), [(4, 1, 2), (2, 3, 2), (6, 2, 3), (8, 1, 1)])
def test_formulas_count_the_shards_that_a_rank_lacks(t: int, p: int, tg: int):
    """M as t*p cells; a rank holds one, its engine shard is the nest of it: t/tg cells of every stage."""
    cells = set(product(range(t), range(p)))
    wanted = {cell for cell in cells if cell[0] // (t // tg) == 0}
    lacking = wanted - {(0, 0)}
    assert hybridflow(t, p, tg).volume == Fraction(len(lacking), len(cells))
    assert hybridflow(t, p, tg).peak == Fraction(len(wanted), len(cells))
    assert full_gather(t, p).volume == Fraction(len(cells) - 1, len(cells))


def test_our_plan_moves_what_the_formula_says_where_engines_nest():
    """tp2 pp2 into tp2: each rank holds its half of its stage. Norms and embeddings are not even: 1 %."""
    known = find_published("llama3-8b")
    assert known is not None
    parallel = ParallelConfig(tp=2, pp=2)
    of = Transition(
        model=known.name,
        spec=known.spec,
        parallel=parallel,
        engines=EngineSizes(tp=2, dp=2),
        engine="native",
        dtype="bfloat16",
        fanout=Fanout.DIRECT,
        gpus_per_node=8,
        bucket_bytes=2**28,
    )
    found = study(of)
    expected = float(hybridflow(2, 2, 2).volume) * of.model_bytes
    assert found.certificate.moved / 4 == pytest.approx(expected, rel=0.01)
    assert found.engine_shard == pytest.approx(of.model_bytes / 2, rel=0.01)
    assert found.training_shard == pytest.approx(of.model_bytes / 4, rel=0.01)


def studied(engines: EngineSizes) -> Study:
    """Two stages, of one layer with the embedding and of four with the output layer."""
    return study(
        Transition(
            model="tiny",
            spec=tiny_spec(num_layers=5),
            parallel=ParallelConfig(pp=2, layers_per_stage=(1, 4)),
            engines=engines,
            engine="native",
            dtype="float32",
            fanout=Fanout.DIRECT,
            gpus_per_node=8,
            bucket_bytes=2**28,
        )
    )


def test_our_own_memory_is_that_of_ranks_in_both_pools_and_of_the_busiest_rank():
    apart, first = studied(EngineSizes(dp=3, first_rank=2)), studied(EngineSizes())
    model = apart.transition.model_bytes
    assert apart.engine_shard == first.engine_shard == model
    stages = apart.moved[:2].sum(axis=1) // 3  # each of three engines takes all of both
    assert stages.sum() == model
    assert stages[0] < stages[1]
    assert apart.training_shard == 0
    assert first.training_shard == stages[0]  # the engine is on the rank of the smaller stage
    assert apart.staging == 3 * stages[1] > model  # sent by one rank; an engine receives the model once
    assert first.staging == stages[1]


def test_assumptions_that_do_not_hold_are_named():
    parallel = ParallelConfig(tp=4, dp=2)
    full, nested, zero = schemes(parallel, EngineSizes(tp=2, dp=4))
    assert full.misfits == nested.misfits == ()
    assert len(zero.misfits) == 1
    assert full.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert nested.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert zero.groups == (tuple(range(8)),)
    apart = schemes(parallel, EngineSizes(tp=2, dp=2, first_rank=8))
    assert all("engines on the training ranks" in one.misfits for one in apart)
    wider = schemes(parallel, EngineSizes(tp=8))[1]
    assert wider.shares is None
    assert "tp 8, 4" in wider.misfits[0]
    some = schemes(parallel, EngineSizes(tp=2, dp=1))[1]
    assert some.misfits == ("an engine on every training rank",)
    experts = schemes(parallel, EngineSizes(tp=2, dp=4), moe=True)
    assert "experts" in experts[0].misfits[0]
    seconds = [one.seconds(8 * GB, Topology.blocks(8, ranks_per_node=8), SLOW) for one in experts]
    assert seconds == [None, None, pytest.approx(0.7)]


def test_stages_of_a_micro_dp_group_lie_a_tp_apart():
    nested = schemes(ParallelConfig(tp=4, pp=2, first_rank=8), EngineSizes(tp=4, dp=2, first_rank=8))[1]
    assert nested.groups == ((8, 12), (9, 13), (10, 14), (11, 15))


SLOW = Bandwidths(intra_node_gbps=80, inter_node_gbps=8)  # 10 and 1 GB/s
GB = 10**9


def test_seconds_of_a_gather_by_hand():
    two_nodes = Topology.blocks(4, ranks_per_node=2)
    # 2 shards from the other node, a half of them over each rank's link: 1 GB at 1 GB/s; the other 2 GB inside.
    assert gather_seconds([(0, 1, 2, 3)], GB, two_nodes, SLOW) == pytest.approx(1.0)
    assert gather_seconds([(0, 1), (2, 3)], GB, two_nodes, SLOW) == pytest.approx(0.1)
    assert gather_seconds([(0, 2), (1, 3)], GB, two_nodes, SLOW) == pytest.approx(1.0)
    assert gather_seconds([(0, 1, 2)], GB, two_nodes, SLOW) == pytest.approx(2.0)
    assert gather_seconds([(0,)], GB, two_nodes, SLOW) == 0.0


def test_the_slowest_rank_is_that_of_the_slowest_link_and_direction():
    def rank(number: int, inside: int, across: int, out: int) -> RankTraffic:
        received = {Link.SAME_RANK: 90 * GB, Link.SAME_NODE: inside, Link.ACROSS_NODES: across}
        sent = {Link.SAME_RANK: 0, Link.SAME_NODE: 0, Link.ACROSS_NODES: out}
        return RankTraffic(number, received, sent, bound=0, far_bound=0)

    found = slowest(Certificate((rank(4, 9 * GB, 0, 0), rank(5, 0, GB // 2, 2 * GB)), staging_bytes=0), SLOW)
    assert (found.seconds, found.rank, found.link, found.direction) == (2.0, 5, Link.ACROSS_NODES, "out")
    found = slowest(Certificate((rank(4, 90 * GB, 0, 0), rank(5, 0, GB, 2 * GB)), staging_bytes=0), SLOW)
    assert (found.seconds, found.rank, found.link, found.direction) == (9.0, 4, Link.SAME_NODE, "in")
