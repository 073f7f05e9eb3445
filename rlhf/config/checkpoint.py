"""Saving a run so that it can go on, and going on."""

from dataclasses import dataclass
from pathlib import Path

from rlhf.config.checks import at_least, refuse

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving the run so that it can go on, and going on."""

    every_steps: int = 0
    """Save every so many steps and after the last; 0 only when a stop is requested, which always saves."""
    keep_last: int = 2
    """Newest checkpoints that stay; older ones are removed once a newer one is whole."""
    keep_every: int = 0
    """Checkpoints of steps that this divides stay for good; 0 keeps none but the newest."""
    asynchronous: bool = True
    """Training goes on while a copy in host memory is written; False waits for the disk. The last save always waits."""
    resume: str = AUTO
    """auto: go on from the newest whole checkpoint of the run folder, or begin anew where nothing was saved. never:
    begin anew. A checkpoint's folder, of another run: begin from it; later starts go on from the run's own."""
    save_hf_every: int = 0
    """Export the actor as a Hugging Face checkpoint into the run folder's hf/step_N every so many steps; 0 never."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_every", "save_hf_every"):
            at_least(f"checkpoint.{name}", getattr(self, name), 0)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        if self.every_steps > 0 and self.keep_every % self.every_steps:
            refuse(
                f"checkpoint.keep_every: {self.keep_every} is no multiple of checkpoint.every_steps = "
                f"{self.every_steps}, so that steps to keep are not saved; set keep_every to one, or to 0"
            )
        if not self.resume.strip():
            refuse("checkpoint.resume: empty; needs auto, never or a checkpoint's folder; set checkpoint.resume=auto")

    def due(self, step: int) -> bool:
        """Whether a run that has done so many steps is to be saved, and goes on."""
        return self.every_steps > 0 and step % self.every_steps == 0

    def export_due(self, step: int) -> bool:
        """Whether the weights after so many steps are to be exported."""
        return self.save_hf_every > 0 and step % self.save_hf_every == 0

    def check_export(self, save_hf: str, run_folder: Path) -> None:
        """Refuse an export at the run's end that would replace those of single steps."""
        if self.save_hf_every > 0 and save_hf and Path(save_hf).absolute() == (run_folder / "hf").absolute():
            refuse(
                f"save_hf: {save_hf} is where checkpoint.save_hf_every = {self.save_hf_every} puts a folder for each "
                "step, and would replace them; needs another place; leave it out or name one"
            )
