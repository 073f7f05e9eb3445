"""The suite in lanes, each a pytest process: which tests share one, and which begin first (scripts/test.sh).

Jobs behind a launcher mostly wait, for time limits or for each other, while ranks of the pool keep the cores busy: the
two lie in different lanes. Whoever is free takes the next file.
"""

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

KEPT_RANKS = "run_ranks"
LAUNCHED = "tests/scripts/"
ROOT = Path(__file__).resolve().parents[2]


class Lanes(LoadScopeScheduling):
    """Tests of a group run one after the other in one process.

    The groups are told from files: pytest-xdist 3.8's own marks do not reach pytest 9.2's node ids.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.split("::")[0])


def in_turn(items: list[pytest.Item]) -> None:
    """Put the tests of the long groups first."""
    items.sort(key=_turn)


@cache
def group_of(file: str) -> str:
    """Of a test file, named from the root of the repository."""
    if file.startswith(LAUNCHED):
        return "launched"  # no two at once: they have time limits
    if KEPT_RANKS in (ROOT / file).read_text(encoding="utf-8"):
        return "ranks"  # of one pool, whose processes are not started twice
    return file


def _turn(item: pytest.Item) -> int:
    if (group := group_of(item.nodeid.split("::")[0])) in ("ranks", "launched"):
        return ("ranks", "launched").index(group)
    return 2 if item.get_closest_marker("slow") or item.get_closest_marker("sglang") else 3
