"""How large an engine should be at a fixed training layout: what a switch costs against what generation gains.

Small engines are many and need few sums over ranks; large ones receive less at a switch. All ranks generate, whatever
the size (micro data parallelism). The size with the shortest step is recommended: a switch and so many tokens.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from rlhf.config.parallel import ParallelConfig
from rlhf.metrics.palette import COLOURS, FAINT, INK, dress, write_png
from tools.benchmarks import micro_dp_ranks, reshard
from tools.benchmarks.compare import MIB, Options
from tools.benchmarks.measure import Runs
from tools.benchmarks.report import Report, Row

SRC = ParallelConfig(tp=4)
QUICK_SRC = ParallelConfig(tp=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One size of engine."""

    tp: int
    tokens_per_s: float
    """Of all engines together."""
    rate_spread: float
    switch_s: float
    switch_spread: float
    moved: int
    bound: int

    def step_s(self, tokens: int) -> float:
        """Seconds of a switch and of so many generated tokens."""
        return self.switch_s + tokens / self.tokens_per_s


def run(options: Options, report: Report) -> None:
    """Rows `micro_dp/TRAINING-ENGINE` in seconds of a step, with `/rate`, `/switch`, `/bytes`; and `/recommended`."""
    src = QUICK_SRC if options.quick else SRC
    name = f"micro_dp/tp{src.tp}"
    if not options.wants(name):
        return
    tokens = options.step_tokens
    sizes = sizes_of(_measured(src, options), _tokens(options))
    trained = next(size for size in sizes if size.tp == src.tp)
    for size in sizes:
        _add(report, f"{name}-tp{size.tp}", size, trained, tokens)
    best = recommended(sizes, tokens)
    report.add(
        Row(
            name=f"{name}/recommended",
            value=best.tp,
            unit="tp",
            peer=f"engines of the training's tp{src.tp}: {trained.step_s(tokens):.3g} s a step",
            ratio=round(trained.step_s(tokens) / best.step_s(tokens), 3),
        )
    )
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    write_png(figure(sizes, best, tokens, training=f"tp{src.tp}"), options.picture)
    report.note(f"engines of tp{best.tp} for steps of {tokens:,} tokens; picture: {options.picture}")
    if close := as_good(sizes, best, tokens):
        report.note(f"within the spread of the runs: {', '.join(f'tp{size.tp}' for size in close)}")


def sizes_of(found: dict[str, Any], tokens_per_run: int) -> list[Size]:
    """From the seconds that the ranks measured."""
    sizes = []
    for tp, of_size in found.items():
        switch, generate = Runs(tuple(of_size["switch"])), Runs(tuple(of_size["generate"]))
        sizes.append(
            Size(
                tp=int(tp),
                tokens_per_s=tokens_per_run / generate.median,
                rate_spread=generate.spread,
                switch_s=switch.median,
                switch_spread=switch.spread,
                moved=of_size["moved"],
                bound=of_size["bound"],
            )
        )
    return sorted(sizes, key=lambda size: size.tp)


def recommended(sizes: list[Size], tokens: int) -> Size:
    """The size with the shortest step of so many tokens; of equals the largest, which holds least memory a rank."""
    return min(sizes, key=lambda size: (size.step_s(tokens), -size.tp))


def as_good(sizes: list[Size], best: Size, tokens: int) -> list[Size]:
    """Other sizes whose step is longer by less than the spread of either's generation."""
    limit = best.step_s(tokens)
    return [
        size
        for size in sizes
        if size is not best and size.step_s(tokens) < limit * (1 + max(size.rate_spread, best.rate_spread))
    ]


def figure(sizes: list[Size], best: Size, tokens: int, *, training: str) -> Figure:
    """Seconds of a step, tokens a second, bytes of a switch, for each size."""
    layout = ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09)
    drawn = Figure(figsize=(11, 3.6), dpi=110, layout=layout, facecolor="white")
    axes = [drawn.add_subplot(1, 3, place) for place in (1, 2, 3)]
    places, names = range(len(sizes)), [f"tp{size.tp}" for size in sizes]
    switch, generate = [size.switch_s for size in sizes], [tokens / size.tokens_per_s for size in sizes]
    dress(axes[0], f"Seconds of a step of {tokens:,} tokens")
    axes[0].bar(places, generate, 0.6, color=COLOURS[0], label="generate")
    axes[0].bar(places, switch, 0.6, bottom=generate, color=COLOURS[1], label="switch")
    axes[0].legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left", ncols=2)
    rates = [size.tokens_per_s for size in sizes]
    _one(axes[1], "Tokens per second, all engines", rates, [f"{rate:,.0f}" for rate in rates])
    moved = [size.moved / MIB for size in sizes]
    said = [f"{mib:,.0f} MiB\n{size.switch_s:.2g} s" for mib, size in zip(moved, sizes, strict=True)]
    _one(axes[2], "MiB that a switch moves, and its seconds", moved, said)
    for ax, tops in zip(axes, ([size.step_s(tokens) for size in sizes], None, None), strict=True):
        ax.set_xticks(places, names)
        ax.set_xlabel("engine", fontsize=8, color=FAINT)
        ax.set_ylim(0, ax.get_ylim()[1] * 1.2)
        for place, top in zip(places, tops or (), strict=False):
            ax.text(place, top, f"{top:.3g} s", ha="center", va="bottom", fontsize=8, color=INK)
    drawn.suptitle(
        f"Training {training}: engines of tp{best.tp} have the shortest step", x=0.01, ha="left", color=INK, fontsize=12
    )
    return drawn


def _one(ax: Axes, title: str, values: list[float], said: list[str]) -> None:
    dress(ax, title)
    ax.bar(range(len(values)), values, 0.6, color=COLOURS[7])
    for place, (value, text) in enumerate(zip(values, said, strict=True)):
        ax.text(place, value, text, ha="center", va="bottom", fontsize=8, color=INK)


def _add(report: Report, name: str, size: Size, trained: Size, tokens: int) -> None:
    step, against = size.step_s(tokens), trained.step_s(tokens)
    report.add(
        Row(
            name=name,
            value=round(step, 3),
            unit="s a step",
            peer=f"engines of the training's tp{trained.tp}: {against:.3g} s",
            ratio=round(against / step, 3),
        )
    )
    rate, switch = round(size.tokens_per_s, 1), round(size.switch_s, 4)
    report.add(Row(name=f"{name}/rate", value=rate, unit="tok/s", spread=size.rate_spread))
    report.add(Row(name=f"{name}/switch", value=switch, unit="s", spread=size.switch_spread))
    report.add(
        Row(
            name=f"{name}/bytes",
            value=round(size.moved / MIB, 2),
            unit="MiB",
            target=1.0 if size.moved else None,
            peer=f"lower bound: {size.bound / MIB:,.2f} MiB",
            ratio=size.bound / size.moved if size.moved else None,
        )
    )


def _tokens(options: Options) -> int:
    rows, _, new = _work(options)
    return rows * new


def _work(options: Options) -> tuple[int, int, int]:
    """(rows, prompt tokens, new tokens)."""
    return (8, 8, 4) if options.quick else (64, 32, 32)


def _measured(src: ParallelConfig, options: Options) -> dict[str, Any]:
    world = src.num_ranks
    answer, store = Path(options.folder / "micro_dp.json"), options.folder / "micro_dp_store"
    rows, prompt_tokens, new_tokens = _work(options)
    job = micro_dp_ranks.Job(
        spec=reshard.model(quick=options.quick),
        src=src,
        sizes=tuple(size for size in range(1, world + 1) if world % size == 0),
        rows=rows,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        runs=options.runs,
        threads=max(1, options.threads // world),
        store=str(store),
        answer=str(answer),
    )
    mp.spawn(micro_dp_ranks.main, (job,), nprocs=world)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found
