"""From evidence to a cause: how much of the difference each hypothesis explains. Pure.

The difference is the root mean square, over the tokens compared, of the engine's log-prob less the trainer's. A
hypothesis replaces one side by what it would be without the fault; the share that is gone then is what it explains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from rlhf.trainers.mismatch.evidence import FEWEST, Again, Evidence, ReplayedRow, differing, rms

EXPLAINS = 0.6
"""Least share that names a cause: true ones explain all but noise, and no wrong one was seen to explain half."""
AS_GOOD = 0.1
"""Shares that differ by less are equal; then the cause that stands first in `Cause` is taken."""


class Cause(StrEnum):
    """What a mismatch comes from, the surest evidence first."""

    WEIGHTS = "weights"
    SHIFT = "shift"
    SAMPLING = "sampling"
    PACKING = "packing"
    KERNELS = "kernels"


ADVICE = {
    Cause.WEIGHTS: "the engine computes with other weights than the actor's; set sync.verify=all to find the step in "
    "which it begins; look at what writes to an engine's parameters, and at copies of them (packed, quantised)",
    Cause.SHIFT: "each log-prob belongs to the neighbouring token; look at how the engine's log-probs are cut out of "
    "its answer",
    Cause.SAMPLING: "the engine's log-probs are of another distribution than rollout.sampling says; compare "
    "temperature, top_p and top_k of its requests, its defaults from generation_config.json; does it renormalise?",
    Cause.PACKING: "a sequence's log-probs depend on what it is computed with; look at positions, boundaries and masks "
    "of packed sequences on the side that is named",
    Cause.KERNELS: "weights, sampling, places and packing agree, so the two sides compute otherwise; compare dtypes, "
    "attention kernels, RoPE and norms of engine and trainer; if the spread is one that you accept, raise the limits",
}
"""What to do next."""

NO_EVIDENCE = "wait for the next breach, which is looked into again; see the logs of the engines for why they were lost"


@dataclass(frozen=True, slots=True)
class Score:
    """One hypothesis."""

    cause: Cause
    share: float
    """Of the difference that it explains, 0 to 1."""
    finding: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause that is named, and what speaks for it."""

    cause: Cause | None
    """None where no engine was left to be asked, and the trainer's side alone explains nothing."""
    finding: str
    scores: tuple[Score, ...]
    """Of all causes, in their order."""
    difference: float
    """Root mean square over the replayed tokens, in nats."""
    tokens: int
    """Of the replayed rows that were compared."""
    lost_engines: int = 0
    """See `Evidence`."""

    @property
    def name(self) -> str:
        """Of the cause."""
        return self.cause.value if self.cause is not None else "unknown"

    @property
    def advice(self) -> str:
        """What to do next."""
        return ADVICE[self.cause] if self.cause is not None else NO_EVIDENCE


def judge(evidence: Evidence) -> Verdict:
    """Name the cause."""
    weights, others = _weights(evidence), [_shift(evidence), _sampling(evidence), _packing(evidence)]
    best = max(others, key=lambda score: score.share)
    best = next(score for score in others if score.share > best.share - AS_GOOD)
    kernels = _kernels(evidence, rest=1.0 - max(best.share, weights.share))
    named = kernels
    if weights.share >= EXPLAINS:
        named = weights
    elif best.share >= EXPLAINS:
        named = best
    difference, tokens = _spread(evidence.rows, _old)
    cause: Cause | None = named.cause
    finding = named.finding
    if named is kernels and _no_engine_was_seen(evidence):
        cause, finding = None, "no engine could be compared or asked again"
    return Verdict(cause, finding, (weights, *others, kernels), difference, tokens, evidence.lost_engines)


def stale(tokens: int, policy_version: int) -> Verdict:
    """Of a step in which engines answered, but not by the weights that they were sent: no replay is needed."""
    finding = (
        f"{tokens} tokens were drawn, none by the trainer's policy version {policy_version}: the weights are stale"
    )
    return Verdict(Cause.WEIGHTS, finding, (Score(Cause.WEIGHTS, 1.0, finding),), 0.0, 0)


def _no_engine_was_seen(evidence: Evidence) -> bool:
    return not (evidence.weights.was_possible or evidence.alone or evidence.together)


def _weights(evidence: Evidence) -> Score:
    """Checksums decide where they could be taken; else a complete sync that mends the difference does."""
    check = evidence.weights
    if check.tensors:
        many = len(check.tensors) * 10 >= check.of * 9
        what = f"{len(check.tensors)} of {check.of} tensors differ"
        what += ", as if an update had not arrived" if many and check.of > 1 else ""
        return Score(Cause.WEIGHTS, 1.0, f"{what}: {check.text}")
    if check.was_possible:
        return Score(Cause.WEIGHTS, 0.0, f"all {check.of} tensors are equal on both sides")
    if _no_engine_was_seen(evidence):
        return Score(Cause.WEIGHTS, 0.0, "not known: no engine could be compared or asked again")
    mended = min(_gone(evidence, evidence.alone), _gone(evidence, evidence.together))
    if mended >= EXPLAINS:
        return Score(Cause.WEIGHTS, mended, "after all weights were sent again the same prompts come out right")
    return Score(Cause.WEIGHTS, 0.0, "weights were sent again before the replay, and the difference stayed")


def _shift(evidence: Evidence) -> Score:
    share, shift = max(
        (max(_explained(evidence, _old, shift=shift), _explained(evidence, _alone, shift=shift)), shift)
        for shift in (-1, 1)
    )
    where = "before" if shift < 0 else "after"
    return Score(Cause.SHIFT, share, f"best: the engine's log-probs are the trainer's of the token {where}")


def _sampling(evidence: Evidence) -> Score:
    """What another reading explains beyond the same one: readings are taken with each row alone."""
    which = differing(evidence.rows)
    rows = [evidence.rows[at] for at in which]
    whole, tokens = _spread(rows, _old)
    alone, _ = _spread(rows, _alone)
    found = []
    for reading, columns in evidence.readings.items():
        read = [replace(row, alone=columns[at]) for at, row in zip(which, rows, strict=True)]
        found.append((_spread(read, _alone)[0], reading))
    if not found or not whole or tokens < FEWEST:
        return Score(Cause.SAMPLING, 0.0, "too little to try other readings on")
    left, reading = min(found)
    share = max(0.0, (alone - left) / whole)
    return Score(Cause.SAMPLING, share, f"best: the engine's log-probs are of {reading}; set: {evidence.sampling}")


def _packing(evidence: Evidence) -> Score:
    trainer = _explained(evidence, _alone)
    engine = _gone(evidence, evidence.alone)
    was_sent_again = bool(evidence.weights.tensors or evidence.lost_engines) or not evidence.weights.was_possible
    if was_sent_again and _gone(evidence, evidence.together) >= EXPLAINS:
        engine = 0.0  # right in a batch too: new weights, or a new engine, have mended it
    if trainer >= engine:
        return Score(Cause.PACKING, trainer, "trainer: scored alone, without other rows beside it, against as it was")
    return Score(Cause.PACKING, engine, "engine: the same prompts asked alone, against the answers that it gave")


def _kernels(evidence: Evidence, *, rest: float) -> Score:
    difference = torch.cat([(row.rollout_logprobs - row.old_logprobs)[row.used] for row in evidence.rows]).double()
    if not difference.numel():
        return Score(Cause.KERNELS, max(0.0, rest), "nothing could be compared")
    bias = float(difference.mean()) / max(float(difference.square().mean().sqrt()), 1e-30)
    kind = "noise about 0" if abs(bias) < 0.5 else "to one side"
    engines = sorted({one.engine for one in evidence.alone})
    sizes = (rms([one.rollout_logprobs - one.trainer for one in evidence.alone if one.engine == e]) for e in engines)
    asked = ", ".join(f"of rank {e} {size:.1e}" for e, size in zip(engines, sizes, strict=True))
    return Score(
        Cause.KERNELS,
        max(0.0, rest),
        f"what nothing else explains; {kind} (mean {bias:+.2f} of its size)"
        + (f"; engines asked again: {asked}" if asked else "; no engine answered again"),
    )


def _old(row: ReplayedRow) -> Tensor:
    return row.old_logprobs


def _alone(row: ReplayedRow) -> Tensor:
    return row.alone


def _spread(rows: Sequence[ReplayedRow], pick: Callable[[ReplayedRow], Tensor]) -> tuple[float, int]:
    """(root mean square of the engine's log-probs less the picked ones, tokens)."""
    parts = [(row.rollout_logprobs - pick(row))[row.used] for row in rows]
    return rms(parts), sum(part.numel() for part in parts)


def _explained(evidence: Evidence, pick: Callable[[ReplayedRow], Tensor], *, shift: int = 0) -> float:
    """Share of the difference that is gone when the engine's log-prob of token i is compared with one of i + shift."""
    before, after = [], []
    for row in (evidence.rows[at] for at in differing(evidence.rows, spare=abs(shift))):
        used, total = row.used, len(row.counts)
        here = slice(max(0, -shift), min(total, total - shift))
        there = slice(max(0, shift), min(total, total + shift))
        both = used[here] & used[there]
        before.append((row.rollout_logprobs - row.old_logprobs)[here][both])
        after.append((row.rollout_logprobs[here] - pick(row)[there])[both])
    whole = rms(before)
    too_few = shift != 0 and sum(part.numel() for part in before) < FEWEST
    return max(0.0, 1.0 - rms(after) / whole) if whole and not too_few else 0.0


def _gone(evidence: Evidence, again: Sequence[Again]) -> float:
    """Share of the engine's own difference that is gone in new answers; of the engine in which least of it is."""
    engines = sorted({one.engine for one in again})
    return min((_gone_in(evidence, [one for one in again if one.engine == engine]) for engine in engines), default=0.0)


def _gone_in(evidence: Evidence, again: Sequence[Again]) -> float:
    """Of one engine's answers.

    A row that got the same tokens is compared with itself. The worst of many rows come out better with other tokens
    whatever the cause; so all answers together are compared with the mean over the whole step, too.
    """
    before, after, whole = [], [], []
    for one in again:
        row = evidence.rows[one.row]
        asked = slice(len(one.responses))  # long ones are cut short the second time
        used = row.used[asked]
        if used.any() and torch.equal(row.responses[asked], one.responses):
            before.append((row.rollout_logprobs - row.alone)[asked][used])
            whole.append((row.rollout_logprobs - row.old_logprobs)[asked][used])
            after.append((one.rollout_logprobs - one.trainer)[used])
    size = rms(whole)
    of_rows = max(0.0, (rms(before) - rms(after)) / size) if size else 0.0
    apart = torch.cat([one.rollout_logprobs - one.trainer for one in again]).double().abs()
    engines_part = 1.0 - _explained(evidence, _alone)
    of_step = engines_part * (1.0 - float(apart.mean()) / evidence.step_mean) if evidence.step_mean else 0.0
    return max(of_rows, of_step)
