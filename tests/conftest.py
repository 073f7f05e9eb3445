"""Settings that hold for every test."""

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.harness.lanes import Lanes

# Machines that run the suite are shared: a slow draw is no fault of the code, and no test asserts a wall-clock time.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the longest tests out unless -m asks for them by name; in a lane the long ones come first."""
    items[:] = [item for item in items if _asked_for(item) in config.option.markexpr]
    if hasattr(config, "workerinput"):  # of pytest-xdist: this process is a lane
        from tests.harness.lanes import in_turn  # pytest-xdist need not be there

        in_turn(items)


def _asked_for(item: pytest.Item) -> str:
    """The marker that -m must name for the test to be run; empty for most."""
    return next((name for name in ("proof", "quickstart") if item.get_closest_marker(name)), "")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "Lanes":
    """Who runs what, where the suite runs in lanes."""
    from tests.harness.lanes import Lanes  # as above: it need not be there

    return Lanes(config, log)
