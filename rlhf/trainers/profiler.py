"""Timelines of the steps that the config names: recorded on every rank, brought together and written by rank 0."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from rlhf.config.profile import ProfileConfig
from rlhf.dist.clocks import compare_clocks
from rlhf.metrics.run_folder import RunFolder
from rlhf.metrics.timeline import RankTrace, Timeline
from rlhf.metrics.timers import Interval, Timers


class StepProfiler:
    """Looks at single steps; the others pass through. Every rank of the job makes the same calls."""

    def __init__(
        self,
        config: ProfileConfig,
        *,
        timers: Timers,
        group: ProcessGroup,
        host: str,
        device: torch.device,
        folder: RunFolder,
    ) -> None:
        """`group`: gloo, over all ranks of the job."""
        self._config, self._timers, self._group = config, timers, group
        self._host, self._device, self._folder = host, device, folder
        self._rank = dist.get_rank(group)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is step `number` (from 1). Collective over the job at its end, when the step is looked at."""
        if number not in self._config.steps:
            yield
            return
        with self._torch_trace(number), self._timers.recording() as intervals:
            yield
        with self._timers.phase("profile"):
            traces = self._gather(intervals)
            if traces:
                self._write(Timeline(self._folder.path.name, number, traces))

    def _gather(self, intervals: Sequence[Interval]) -> tuple[RankTrace, ...]:
        """Traces of all ranks on rank 0, none elsewhere."""
        reading = compare_clocks(self._host, self._group, clock=self._timers.clock)[self._rank]
        mine = RankTrace(self._rank, self._host, tuple(intervals), reading.ahead_s, reading.error_s)
        found: list[RankTrace | None] | None = [None] * dist.get_world_size(self._group) if self._rank == 0 else None
        dist.gather_object(mine, found, group=self._group, group_dst=0)
        return tuple(trace for trace in found or () if trace is not None)

    def _write(self, timeline: Timeline) -> None:
        from rlhf.metrics.timeline_picture import draw_timeline  # noqa: PLC0415  # matplotlib takes a second

        self._folder.write_timeline(timeline.step, timeline.chrome_trace())
        draw_timeline(timeline, self._folder.timeline(timeline.step, "png"))

    @contextmanager
    def _torch_trace(self, number: int) -> Iterator[None]:
        if not self._config.torch:
            yield
            return
        path = self._folder.torch_trace(number, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        with profile(activities=kinds) as profiler:
            yield
        profiler.export_chrome_trace(str(path))
