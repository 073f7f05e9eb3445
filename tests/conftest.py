"""Settings that hold for every test."""

import pytest
from hypothesis import HealthCheck, settings

from tests.harness.lanes import to_lanes

# Machines that run the suite are shared: a slow draw is no fault of the code, and no test asserts a wall-clock time.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the quickstart's own test out unless -m asks for it by name; share the others out over the lanes."""
    if "quickstart" not in config.option.markexpr:
        items[:] = [item for item in items if item.get_closest_marker("quickstart") is None]
    if hasattr(config, "workerinput"):  # of pytest-xdist: this process is a lane
        to_lanes(items)
