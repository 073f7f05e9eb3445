"""The suite in lanes, each a pytest process: which tests share one, and which begin first (-n 2 --dist loadgroup).

Jobs behind a launcher mostly wait, for time limits or for each other, while ranks of the pool keep the cores busy: the
two lie in different lanes. Whoever is free takes the next file.
"""

import pytest

KEPT_RANKS = "run_ranks"
LAUNCHED = "tests.scripts."


def to_lanes(items: list[pytest.Item]) -> None:
    """Name each test's group, whose tests run one after the other in one process, and put the long groups first."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_turn)


def _group(item: pytest.Item) -> str:
    module = item.getparent(pytest.Module)
    assert module is not None
    if hasattr(module.obj, KEPT_RANKS):
        return "ranks"  # of one pool, whose processes are not started twice
    if module.obj.__name__.startswith(LAUNCHED):
        return "launched"  # no two at once: they have time limits
    return module.obj.__name__


def _turn(item: pytest.Item) -> int:
    if (group := _group(item)) in ("ranks", "launched"):
        return ("ranks", "launched").index(group)
    return 2 if item.get_closest_marker("slow") or item.get_closest_marker("sglang") else 3
