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
    """Leave the quickstart's own test out unless -m asks for it by name; in a lane the long ones come first."""
    if "quickstart" not in config.option.markexpr:
        items[:] = [item for item in items if item.get_closest_marker("quickstart") is None]
    if hasattr(config, "workerinput"):  # of pytest-xdist: this process is a lane
        from tests.harness.lanes import in_turn  # pytest-xdist need not be there

        in_turn(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "Lanes":
    """Who runs what, where the suite runs in lanes."""
    from tests.harness.lanes import Lanes  # as above: it need not be there

    return Lanes(config, log)
