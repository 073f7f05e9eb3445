"""Steps that are looked at closely."""

from dataclasses import dataclass

from rlhf.config.checks import at_least, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Timelines of single steps."""

    steps: tuple[int, ...] = ()
    """Steps (from 1) whose timeline over all ranks is written into the run folder's timeline/."""
    torch: bool = False
    """In these steps each rank also writes a trace of torch.profiler there; it slows them down."""

    def __post_init__(self) -> None:
        for step in self.steps:
            at_least("profile.steps", step, 1)
        if self.torch and not self.steps:
            refuse("profile.torch: true given, but profile.steps = []; needs steps to trace; set profile.steps=[3]")

    def check_steps(self, num_steps: int) -> None:
        """Refuse steps that a run of so many does not have."""
        if late := [step for step in self.steps if step > num_steps]:
            refuse(
                f"profile.steps: {late[0]} given, but num_steps = {num_steps}; needs steps that the run has; lower the "
                f"first or raise num_steps"
            )
