"""Settings that hold for every test."""

from hypothesis import HealthCheck, settings

# Machines that run the suite are shared: a slow draw is no fault of the code, and no test asserts a wall-clock time.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
