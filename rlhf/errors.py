"""Every error that a user of the package may want to catch."""


class RlhfError(Exception):
    """Root of the package's errors. Messages read `where: what was found; what is needed; what to change`."""


class ConfigError(RlhfError, ValueError):
    """A setting, or two settings together, cannot work. Raised before any device is touched."""


class LayoutError(RlhfError):
    """A layout cannot hold a model, or two layouts of one model cannot be mapped onto each other."""


class ShapeError(RlhfError, ValueError):
    """A tensor has not the shape or dtype its docstring asks for."""


class CheckpointError(RlhfError):
    """A checkpoint folder is missing something, is cut short, or holds another model than the one asked for."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is not as it was written: gone, cut short or changed."""


class UnreadableError(CheckpointError):
    """A file of a checkpoint could not be read, several times over; which says nothing about what lies on the disk."""


class SaveError(RlhfError):
    """What a run was to write could not be written: its state where it ends, or its model."""


class DataError(RlhfError):
    """A data file or one of its rows cannot be used."""


class RewardError(RlhfError):
    """A reward function failed and the policy for failures says that this ends the run."""


class EngineError(RlhfError):
    """A rollout engine was asked for what it cannot do, or has died."""


class EngineLostError(EngineError):
    """A process of a rollout engine died, was stopped or hangs. The engine answers nothing until it is restarted."""


class WeightSyncError(RlhfError):
    """After a weight sync the engine does not hold the trainer's weights."""


class MismatchError(RlhfError):
    """Engines and trainer give other log-probs to the same tokens than the limits allow, and the policy is to stop."""


class PeerLostError(WeightSyncError, RuntimeError):
    """What another rank was to give cannot be had. Where that rank has died, its death ends the job, not this error."""


class AgreementError(RlhfError):
    """Ranks of a group hold different values where all must hold the same."""
