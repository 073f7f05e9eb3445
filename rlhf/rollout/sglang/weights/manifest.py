"""What a scheduler must know of a transfer, as JSON and back: what its rank holds, what lies where in which window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.errors import WeightSyncError
from rlhf.reshard.layout import Box, ParamLayout
from rlhf.reshard.windows import Manifest


@dataclass(frozen=True, slots=True)
class Landing:
    """One block of a window and its place in a parameter."""

    one: ParamLayout
    box: Box
    at: int
    """Its first element in the window."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A block that is held twice: copied from its first place when that is filled."""

    first: ParamLayout
    second: ParamLayout
    box: Box


@dataclass(frozen=True, slots=True)
class Coming:
    """A transfer as the scheduler sees it."""

    dtype: str
    complete: bool
    held: Mapping[str, tuple[ParamLayout, ...]]
    """By tensor: all that the rank holds."""
    padding: Mapping[str, int]
    """By parameter: elements that belong to no tensor."""
    windows: tuple[tuple[Landing, ...], ...]
    repeats: tuple[Repeat, ...]


def write_manifest(manifest: Manifest, *, dtype: str, padding: Mapping[str, int]) -> dict[str, Any]:
    """As JSON, for `read_manifest`."""
    number = {one: at for at, one in enumerate(manifest.held)}
    return {
        "dtype": dtype,
        "complete": manifest.complete,
        "padding": dict(padding),
        "held": [[one.tensor, one.box.spans, one.param, one.param_start] for one in manifest.held],
        "windows": [
            [[piece.move.tensor, piece.move.box.spans, piece.at] for piece in window.pieces]
            for window in manifest.windows
        ],
        "repeats": [[number[echo.first], number[echo.second], echo.box.spans] for echo in manifest.echoes],
    }


def read_manifest(told: Mapping[str, Any]) -> Coming:
    """Back from JSON.

    Raises:
        WeightSyncError: A block of a window lies in nothing that the rank holds.
    """
    every = [ParamLayout(tensor, as_box(spans), param, tuple(start)) for tensor, spans, param, start in told["held"]]
    held: dict[str, tuple[ParamLayout, ...]] = {}
    for one in every:
        held[one.tensor] = (*held.get(one.tensor, ()), one)
    return Coming(
        dtype=told["dtype"],
        complete=told["complete"],
        held=held,
        padding=told["padding"],
        windows=tuple(tuple(_landing(held, *piece) for piece in window) for window in told["windows"]),
        repeats=tuple(Repeat(every[first], every[second], as_box(spans)) for first, second, spans in told["repeats"]),
    )


def _landing(
    held: Mapping[str, Sequence[ParamLayout]], tensor: str, spans: Sequence[Sequence[int]], at: int
) -> Landing:
    box = as_box(spans)
    for one in held.get(tensor, ()):
        if len(one.box.spans) == len(box.spans) and one.box.contains(box):
            return Landing(one, box, at)
    raise WeightSyncError(
        f"weight update: {tensor} at {box.spans} arrives, which this rank of the engine does not hold; needs the same "
        "layout at both ends"
    )


def as_box(spans: Sequence[Sequence[int]]) -> Box:
    """A box from the spans that JSON brought."""
    return Box(tuple((start, stop) for start, stop in spans))
