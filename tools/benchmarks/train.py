"""Training: our optimizer step against transformers' forward and backward on the same ragged batch."""

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
from tools.benchmarks.work import WORKS, numbers, prompts

TARGETS = {"equal": 1.0, "spread": 1.5}
MICROBATCH_TOKENS = 2048
"""Of one forward pass on both sides; the peer's padding counts."""
SHORTEST, LONGEST = 16, 512
NUM_ROWS = {"tiny": 64, "smol": 16}
"""With lengths spread: an optimizer step's worth for tiny; what takes seconds for smol."""
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 1e-3
"""Relative; both sides compute in float32 and add up in different orders."""


def lengths_of(kind: str, case: str, *, quick: bool) -> list[int]:
    """Tokens of each row, prompt and response together."""
    if case == "equal":
        return [256] * (2 if quick else 8)
    count = 8 if quick else NUM_ROWS[kind]
    return [SHORTEST + drawn % (LONGEST - SHORTEST + 1) for drawn in numbers(count, seed=1)]


def run(options: Options, report: Report) -> None:
    """Rows `train/WORK/CASE` in tokens a second, padding not counted; `train/WORK/CASE/step` with the optimizer."""
    for kind in missing_models(report, options, ["tiny"] if options.quick else list(WORKS)):
        cases = [case for case in TARGETS if options.wants(f"train/{kind}/{case}")]
        if not cases:
            continue
        sides = [
            SideOf(name="native", module="native_train", python=options.python),
            SideOf(name="transformers", module="hf_train", python=options.peers["hf"]),
        ]
        arguments = (str(options.models[kind]), str(options.threads))
        with started(sides, *arguments, options=options, report=report) as found:
            for case in cases:
                _compare(found, kind, case, options, report)
            add_memory(report, f"train/{kind}", found)


def _compare(sides: list[Side], kind: str, case: str, options: Options, report: Report) -> None:
    name, lengths = f"train/{kind}/{case}", lengths_of(kind, case, quick=options.quick)
    request = {
        "rows": prompts(WORKS[kind], len(lengths), lengths=lengths),
        "responses": [length - max(1, length // 4) for length in lengths],
        "microbatch_tokens": MICROBATCH_TOKENS,
    }
    answers = take_turns(sides, options.runs, request, report, warm_up={})
    for key, row_name, target in (("model_s", name, TARGETS[case]), ("step_s", f"{name}/step", None)):
        add_comparison(
            report,
            row_name,
            unit="tok/s",
            rates={side: Runs(tuple(answer[key] for answer in of_side)) for side, of_side in answers.items()},
            per_run=dict.fromkeys(answers, sum(lengths)),
            target=target,
        )
    _check_same_work(name, {side: of_side[0] for side, of_side in answers.items()}, report)
    if options.profile:
        report.note(sides[0].ask(**request, profile=True)["profile"])


def _check_same_work(name: str, answers: dict[str, dict[str, float]], report: Report) -> None:
    """Both sides must find the same loss and the same gradient."""
    ours, *others = answers
    for side in others:
        for key, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
            mine, theirs = answers[ours][key], answers[side][key]
            assert abs(mine - theirs) <= tolerance * abs(theirs), f"{name}: {key} {mine} here, {theirs} with {side}"
        passes = {side: int(answers[side]["passes"]) for side in answers}
        padded = answers[side]["padded_tokens"] / answers[ours]["padded_tokens"]
        report.note(
            f"{name}: loss {answers[ours]['loss']:.5f} on both sides; forward passes {passes}; "
            f"{side} computes {padded:.2f} times our tokens, padding included"
        )
