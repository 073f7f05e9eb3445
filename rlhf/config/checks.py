"""Small rules that many settings share, with one wording."""

from rlhf.errors import ConfigError


def at_least(where: str, value: float, low: float) -> None:
    """Raise ConfigError unless value >= low."""
    if not value >= low:
        raise ConfigError(f"{where}: {value} given; needs at least {low}; set {where}={low}")


def more_than(where: str, value: float, low: float) -> None:
    """Raise ConfigError unless value > low."""
    if not value > low:
        raise ConfigError(f"{where}: {value} given; needs more than {low}; raise it")


def between(where: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f"{where}: {value} given; needs {low} to {high}; change it")


def one_of(where: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless value is one of the allowed words."""
    if value not in allowed:
        raise ConfigError(f"{where}: {value!r} given; needs one of {', '.join(allowed)}; change it")


def folder_name(where: str, value: str) -> None:
    """Raise ConfigError unless value can name one folder: no separators, no spaces at its ends, not hidden."""
    if not value.strip() or value != value.strip() or value.startswith(".") or {"/", "\\", "\0"} & set(value):
        raise ConfigError(
            f"{where}: {value!r} given; needs the name of a folder, without slashes or a leading dot; change it"
        )
