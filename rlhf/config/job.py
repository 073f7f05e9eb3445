"""Life of the job's processes."""

from dataclasses import dataclass

from rlhf.config.checks import at_least, more_than, one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Life of the processes."""

    device: str = "auto"
    """auto (CUDA where there is one, else CPU), cpu or cuda."""
    alive_limit_s: float = 60.0
    """A rank whose heartbeat stands still for this long (stopped, or its machine gone) ends the job, in seconds."""
    progress_limit_s: float = 600.0
    """A rank that makes no progress for this long ends the job as hung, in seconds."""
    collective_timeout_s: float = 1200.0
    """A collective that its peers do not join within this time fails, in seconds."""
    torch_threads: int = 0
    """CPU threads for maths on each rank; 0 shares the machine's cores out evenly."""

    def __post_init__(self) -> None:
        one_of("job.device", self.device, ("auto", "cpu", "cuda"))
        more_than("job.alive_limit_s", self.alive_limit_s, 0.0)
        more_than("job.progress_limit_s", self.progress_limit_s, 0.0)
        more_than("job.collective_timeout_s", self.collective_timeout_s, 0.0)
        at_least("job.torch_threads", self.torch_threads, 0)
