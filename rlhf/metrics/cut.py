"""Lines of a record up to a step: what a resume keeps of it. Lines that a crash cut short are dropped."""

import json
from collections.abc import Iterator
from pathlib import Path


def lines_up_to(path: Path, last_step: int) -> Iterator[str]:
    """The lines, each an object with a `step`, of steps up to `last_step`, in their order, with their line ends."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            step = _step_of(line)
            if step is not None and step <= last_step:
                yield line if line.endswith("\n") else line + "\n"


def one_line_a_step(path: Path, last_step: int) -> list[str]:
    """The same by ascending steps; of two lines of one step the later counts."""
    of_step = {_step_of(line): line for line in lines_up_to(path, last_step)}
    return [line for _, line in sorted((step, line) for step, line in of_step.items() if step is not None)]


def _step_of(line: str) -> int | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
