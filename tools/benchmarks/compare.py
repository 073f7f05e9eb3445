"""What benchmarks have in common: the user's choices, sides that take turns, ours against the fastest."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tools.benchmarks.measure import Runs
from tools.benchmarks.report import Report, Row, number
from tools.benchmarks.side import Side, SideError

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user asked for."""

    quick: bool
    """Sizes and runs cut so that it ends within a minute."""
    runs: int
    """Measured runs of each side, after a warm-up."""
    only: str
    """Pattern of row names."""
    profile: bool
    threads: int
    python: str
    """Our own interpreter."""
    peers: Mapping[str, str]
    """Interpreters of peers by name; `hf` defaults to our own."""
    models: Mapping[str, Path]
    """Model folders by kind of work; a kind that has none is said to be missing."""
    run_prefix: tuple[str, ...]
    """Put before commands that are measured one at a time."""
    step_tokens: int
    """That a step of `micro_dp` generates."""
    picture: Path
    """PNG that `micro_dp` draws."""
    folder: Path
    """For logs and run folders."""

    def wants(self, name: str) -> bool:
        """Whether a row was asked for."""
        return fnmatch(name, self.only)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideOf:
    """How a side is started, and what it is called in rows."""

    name: str
    module: str
    python: str
    env: tuple[str, ...] = ()


@contextmanager
def started(sides: Sequence[SideOf], *arguments: str, options: Options, report: Report) -> Iterator[list[Side]]:
    """The sides that could be started, ours (the first) among them; of each other it is said why not.

    Raises:
        SideError: Ours could not.
    """
    with ExitStack() as stack:
        found: list[Side] = []
        for side in sides:
            try:
                one = Side(
                    side.name,
                    [side.python, "-m", f"tools.benchmarks.sides.{side.module}", *arguments],
                    threads=options.threads,
                    folder=options.folder,
                    env=side.env,
                )
            except SideError as error:
                if not found:
                    raise
                report.note(f"peer {error}")
                continue
            found.append(stack.enter_context(one))
            report.saw(one.versions)
        yield found


def take_turns(
    sides: list[Side], runs: int, request: Mapping[str, object], report: Report, *, warm_up: Mapping[str, object]
) -> dict[str, list[dict[str, Any]]]:
    """Answers of each side to a request asked `runs` times, the sides one after the other in each round.

    `warm_up` changes the request of the first round, which is not kept. A peer that fails is said and left out of the
    rest; ours (the first side) fails the benchmark.
    """
    answers: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for turn in range(runs + 1):
        for side in list(sides):
            try:
                answer = side.ask(**{**request, **(warm_up if turn == 0 else {})})
            except SideError as error:
                if side is sides[0]:
                    raise
                report.note(f"peer {error}")
                sides.remove(side)
                side.close()
                del answers[side.name]
                continue
            if turn:
                answers[side.name].append(answer)
    return answers


def add_comparison(
    report: Report,
    name: str,
    *,
    unit: str,
    rates: Mapping[str, Runs],
    per_run: Mapping[str, float],
    target: float | None,
) -> None:
    """Rows of one comparison: ours (the first) against the fastest peer, then each peer's own.

    `rates[side]` are seconds, `per_run[side]` the units done in one run.
    """
    ours, *others = rates
    speed = {side: per_run[side] / runs.median for side, runs in rates.items()}
    best = max(others, key=lambda side: speed[side], default=None)
    report.add(
        Row(
            name=name,
            value=round(speed[ours], 2),
            unit=unit,
            target=target,
            peer=f"{best}: {number(speed[best])} {unit}" if best else "no peer ran",
            ratio=round(speed[ours] / speed[best], 3) if best else None,
            spread=rates[ours].spread,
        )
    )
    for side in others:
        report.add(Row(name=f"{name}/{side}", value=round(speed[side], 2), unit=unit, spread=rates[side].spread))


def add_memory(report: Report, name: str, sides: Sequence[Side]) -> None:
    """Rows with the most memory that each side has taken so far."""
    ours, *others = sides
    least = min(others, key=lambda side: side.peak_mib(), default=None)
    report.add(
        Row(
            name=f"{name}/peak memory",
            value=ours.peak_mib(),
            unit="MiB",
            peer=f"{least.name}: {least.peak_mib():,} MiB" if least else "no peer ran",
            ratio=round(least.peak_mib() / ours.peak_mib(), 3) if least else None,
        )
    )
    for side in others:
        report.add(Row(name=f"{name}/peak memory/{side.name}", value=side.peak_mib(), unit="MiB"))


def missing_models(report: Report, options: Options, kinds: Sequence[str]) -> list[str]:
    """The kinds of work whose model is there; of the others it is said."""
    for kind in kinds:
        if kind not in options.models:
            report.note(f"{kind}: no model folder, left out; make one (tools/fetch_smollm2.py) and give --model FOLDER")
    return [kind for kind in kinds if kind in options.models]
