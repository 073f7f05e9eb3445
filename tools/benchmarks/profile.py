"""Where the time of a call goes, by torch's profiler."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

ROWS = 15


def profiled(call: Callable[[], object]) -> str:
    """The operators that take most time of their own, as a table."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=ROWS, max_name_column_width=40)
