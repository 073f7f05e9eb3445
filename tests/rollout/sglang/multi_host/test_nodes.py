"""Where an engine's ranks may lie."""

import pytest

from rlhf.errors import LayoutError
from rlhf.rollout.sglang.multi_host.nodes import Node, nodes_of


def test_ranks_of_one_host_are_one_node_with_one_host_process():
    found = nodes_of([("a", 2), ("a", 4), ("a", 6)])
    assert found.parts == (Node("a", 2, 2),)
    assert [found.leads(rank) for rank in range(3)] == [True, False, False]


def test_ranks_of_several_hosts_are_as_many_nodes_whose_gpus_may_differ():
    found = nodes_of([("b", 6), ("b", 7), ("a", 0), ("a", 1)])
    assert found.parts == (Node("b", 6, 1), Node("a", 0, 1))
    assert [found.of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [found.leads(rank) for rank in range(4)] == [True, False, True, False]
    assert found.title(1) == "node 1 (host a)"
    assert nodes_of([("b", None), ("a", None)]).parts == (Node("b", 0, 1), Node("a", 0, 1))


@pytest.mark.parametrize("hosts", ["aaab", "abab", "abba", "aab"])
def test_uneven_or_mixed_hosts_are_refused(hosts):
    with pytest.raises(LayoutError, match=f"hosts {', '.join(hosts)}; needs as many on each host, one host after"):
        nodes_of([(host, None) for host in hosts])


@pytest.mark.parametrize("gpus", [(0, 1, 3), (2, 1, 0), (1, 1, 1)])
def test_gpus_at_unequal_steps_are_refused_by_host(gpus):
    ranks = [("a", gpu) for gpu in (0, 1, 2)] + [("b", gpu) for gpu in gpus]
    with pytest.raises(LayoutError, match=r"on host b have GPUs \[\d, \d, \d\]; needs equal steps upwards"):
        nodes_of(ranks)
