"""One PPO step: our whole loop against TRL's on the same work, split by phase, with peak memory."""

import json
from pathlib import Path
from statistics import median

from tools.benchmarks.alone import run_alone
from tools.benchmarks.compare import Options, missing_models
from tools.benchmarks.measure import Runs
from tools.benchmarks.ppo_ours import Layout, run_ours
from tools.benchmarks.ppo_work import PHASES, PPOWork, Steps, ppo_work, write_work
from tools.benchmarks.report import Report, Row, number
from tools.benchmarks.side import SideError
from tools.benchmarks.work import WORKS

TARGET = 1.5
PEERS = {"trl": "trl_ppo", "trl-grpo": "trl_grpo"}
"""Name of the interpreter -> side. The first does the same work; GRPO, without critic and reference, is shown too."""
SAME_WORK = "trl"


def run(options: Options, report: Report) -> None:
    """Rows `ppo/WORK` in seconds a step, of the better of our layouts; `ppo/WORK/...` for all else."""
    for kind in missing_models(report, options, ["tiny"] if options.quick else list(WORKS)):
        if not options.wants(f"ppo/{kind}"):
            continue
        work = ppo_work(kind, quick=options.quick)
        file = write_work(kind, work, options.models[kind], options.folder / f"{kind}.json")
        ours = {
            layout.name: run_ours(file, work, options.models[kind], layout, options) for layout in _layouts(options)
        }
        _add_rows(f"ppo/{kind}", ours, _run_peers(kind, file, work, options, report), options, report)


def _layouts(options: Options) -> list[Layout]:
    """One rank with all threads; data parallel with half of them each."""
    alone = Layout(1, options.threads)
    return [alone] if options.quick or options.threads < 2 else [alone, Layout(2, options.threads // 2)]


def _run_peers(kind: str, file: Path, work: PPOWork, options: Options, report: Report) -> dict[str, Steps]:
    found = {}
    for name, side in PEERS.items():
        if name not in options.peers:
            report.note(f"peer {name}: not installed here; give --peer-python {name}=PATH (see --help)")
            continue
        try:
            found[name] = _run_peer(name, side, kind, file, options, report)
        except SideError as error:
            report.note(f"peer {error}")
    return found


def _run_peer(name: str, side: str, kind: str, file: Path, options: Options, report: Report) -> Steps:
    answer, threads = options.folder / f"{name}_{kind}_answer.json", options.threads
    settings = [f"OMP_NUM_THREADS={threads}", "TOKENIZERS_PARALLELISM=false", "HF_HUB_OFFLINE=1", "WANDB_DISABLED=true"]
    program = [options.peers[name], "-m", f"tools.benchmarks.sides.{side}"]
    arguments = [str(options.models[kind]), str(file), str(threads), str(options.runs + 1), str(answer)]
    log = options.folder / f"{name}_{kind}.log"
    peak_mib = run_alone(name, ["env", *settings, *program, *arguments], log=log, prefix=options.run_prefix)
    told = json.loads(answer.read_text(encoding="utf-8"))
    report.saw(told["versions"])
    steps = told["steps"][1:]
    return Steps(
        total=tuple(step["total"] for step in steps),
        phases={phase: tuple(step[phase] for step in steps) for phase in PHASES},
        peak_mib=peak_mib,
    )


def _add_rows(name: str, ours: dict[str, Steps], peers: dict[str, Steps], options: Options, report: Report) -> None:
    best = min(ours, key=lambda layout: median(ours[layout].total))
    peer = peers.get(SAME_WORK)
    report.add(_row(name, ours[best].total, peer.total if peer else None, target=TARGET, detail=f" (ours: {best})"))
    for phase in PHASES:
        theirs = peer.phases[phase] if peer else None
        report.add(_row(f"{name}/{phase}", ours[best].phases[phase], theirs))
    memory = {layout: steps.peak_mib for layout, steps in ours.items()}
    report.add(
        Row(
            name=f"{name}/peak memory",
            value=memory[best],
            unit="MiB",
            peer=f"{SAME_WORK}: {peer.peak_mib:,} MiB" if peer else "no peer ran",
            ratio=round(peer.peak_mib / memory[best], 3) if peer else None,
        )
    )
    for side, steps in (ours | peers).items():
        report.add(_row(f"{name}/{side}", steps.total, None, beside=True))
        for phase in PHASES:
            report.add(_row(f"{name}/{side}/{phase}", steps.phases[phase], None, beside=True))
        report.add(Row(name=f"{name}/{side}/peak memory", value=steps.peak_mib, unit="MiB"))
    if options.profile:
        report.note(_phase_table(name, best, ours[best]))


def _row(
    name: str,
    seconds: tuple[float, ...],
    theirs: tuple[float, ...] | None,
    *,
    target: float | None = None,
    detail: str = "",
    beside: bool = False,
) -> Row:
    runs = Runs(seconds)
    against = f"{SAME_WORK}: {number(median(theirs))} s{detail}" if theirs else f"no peer ran{detail}"
    return Row(
        name=name,
        value=round(runs.median, 3),
        unit="s",
        target=target,
        peer="" if beside else against,
        ratio=round(median(theirs) / runs.median, 3) if theirs else None,
        spread=runs.spread,
    )


def _phase_table(name: str, layout: str, steps: Steps) -> str:
    """Median seconds of every phase that our loop times; a phase inside another counts in both."""
    total = median(steps.total)
    lines = [f"{name}: where our time goes ({layout}, share of the step)"]
    for phase in sorted(steps.phases, key=lambda phase: -steps.phase(phase)):
        lines.append(f"  {phase:<24} {steps.phase(phase):8.3f} s {steps.phase(phase) / total:6.1%}")
    return "\n".join(lines)
