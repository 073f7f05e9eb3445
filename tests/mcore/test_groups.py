"""Which ranks are in which group, with a factory that hands back rank sets in place of process groups."""

from dataclasses import fields

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf.config.parallel import ParallelConfig
from rlhf.mcore import groups as groups_module
from rlhf.mcore.groups import ModelGroups, make_groups


class RankSets:
    """Stands in for a GroupFactory; remembers the collective calls that it was asked for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def device_group(self, rank_sets):
        return self._make("device", rank_sets)

    def cpu_group(self, rank_sets):
        return self._make("cpu", rank_sets)

    def _make(self, kind: str, rank_sets):
        self.calls.append((kind, tuple(rank_sets)))
        return next((ranks for ranks in rank_sets if self.rank in ranks), None)


def made(parallel: ParallelConfig, rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelGroups, RankSets]:
    monkeypatch.setattr(groups_module.dist, "get_rank", lambda: rank)
    factory = RankSets(rank)
    return make_groups(parallel, factory), factory


def test_groups_of_a_rank_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _ = made(ParallelConfig(tp=2, pp=3, dp=2, first_rank=4), 4 + 7, monkeypatch)
    assert (groups.tp_rank, groups.pp_rank, groups.dp_rank) == (1, 0, 1)
    assert (groups.is_first_stage, groups.is_last_stage) == (True, False)
    pool, alone, tp, pp, dp = tuple(range(4, 16)), (11,), (10, 11), (11, 13, 15), (5, 11)
    found = {field.name: getattr(groups.collection, field.name, "unset") for field in fields(ProcessGroupCollection)}
    assert found == {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "mp": tuple(range(10, 16)),
        "cp": alone,
        "tp_cp": tp,
        "dp_cp": dp,
        "intra_dp_cp": dp,
        "tp_dp_cp": (4, 5, 10, 11),
        "embd": (11, 15),
        "pos_embd": alone,
        "ep": alone,
        "expt_tp": alone,
        "tp_ep": alone,
        "tp_ep_pp": pp,
        "expt_dp": (4, 5, 10, 11),
        "intra_expt_dp": (4, 5, 10, 11),
        "inter_dist_opt": None,
        "intra_dist_opt": pool,
        "hcp": "unset",
    }
    assert (groups.cpu, groups.cpu_tp, groups.cpu_pp, groups.cpu_dp) == (pool, tp, pp, dp)


def test_expert_groups_cross_tensor_parallel_peers_and_replicas_of_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two stages of eight ranks: 0 1 4 5 8 9 12 13 and 2 3 6 7 10 11 14 15; rank 9 has position 5 = 1 + 2*(0 + 2*1).
    groups, _ = made(ParallelConfig(tp=2, pp=2, dp=4, ep=2, etp=2), 9, monkeypatch)
    found = {
        name: getattr(groups.collection, name) for name in ("ep", "expt_tp", "tp_ep", "tp_ep_pp", "expt_dp", "tp", "dp")
    }
    assert found == {
        "ep": (9, 13),
        "expt_tp": (8, 9),
        "tp_ep": (8, 9, 12, 13),
        "tp_ep_pp": (8, 9, 10, 11, 12, 13, 14, 15),
        "expt_dp": (1, 9),
        "tp": (8, 9),
        "dp": (1, 5, 9, 13),
    }


def test_etp_above_tp_takes_neighbours_in_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _ = made(ParallelConfig(dp=4, ep=2, etp=2), 2, monkeypatch)
    assert groups.collection.expt_tp == (2, 3)
    assert groups.collection.ep == (0, 2)


def test_etp_below_tp_takes_other_experts_on_tensor_parallel_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _ = made(ParallelConfig(tp=4, dp=2, ep=4), 6, monkeypatch)
    assert groups.collection.expt_tp == (6,)
    assert groups.collection.ep == (4, 5, 6, 7)
    assert groups.collection.expt_dp == (2, 6)


def test_a_middle_stage_has_an_embedding_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _ = made(ParallelConfig(pp=3), 1, monkeypatch)
    assert groups.collection.embd == (1,)


def test_a_rank_outside_the_pool_takes_part_and_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(tp=2, pp=2)
    outside, its_calls = made(parallel, 6, monkeypatch)
    assert not outside.is_member
    assert outside.collection is outside.cpu is outside.cpu_dp is None
    assert its_calls.calls == made(parallel, 3, monkeypatch)[1].calls
