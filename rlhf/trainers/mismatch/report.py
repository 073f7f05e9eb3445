"""A verdict for people, and as a record."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from rlhf.trainers.mismatch.evidence import ReplayedRow
from rlhf.trainers.mismatch.tally import Tally
from rlhf.trainers.mismatch.verdict import Verdict


def as_text(step: int, breach: str, total: Tally, verdict: Verdict, rows: Sequence[ReplayedRow]) -> str:
    """A small table: each cause with the share that it explains, and the sequences that were replayed."""
    lines = [
        f"step {step}: rollout engine and trainer differ: {breach} ({total.tokens:,} tokens compared)",
        f"  cause: {verdict.name.upper()}: {verdict.finding}",
        f"  next: {verdict.advice}",
        "  cause      explains  seen",
        *(f"  {score.cause.value:<9}  {score.share:>7.0%}   {score.finding}" for score in verdict.scores),
    ]
    if verdict.lost_engines:
        lost = f"{verdict.lost_engines} engine" + "s" * (verdict.lost_engines > 1)
        lines.append(f"  {lost} lost meanwhile and replaced: what was not said by then may be missing")
    if rows:
        lines.append("  replayed     prompt  response  mean |difference|  largest  at token")
    lines += [
        f"  {row.sample_id:<11}  {row.prompt_tokens:>6}  {len(row.counts):>8}  {mean:>17.2e}  {largest:>7.1e}  {at:>8}"
        for row, (mean, largest, at) in ((row, _of_row(row)) for row in rows)
    ]
    return "\n".join(lines)


def as_record(step: int, breach: str, total: Tally, verdict: Verdict, rows: Sequence[ReplayedRow]) -> dict[str, object]:
    """The same for programs, with the log-probs of both sides."""
    return {
        "step": step,
        "breach": breach,
        "cause": verdict.name,
        "finding": verdict.finding,
        "advice": verdict.advice,
        "scores": [{"cause": s.cause.value, "explains": s.share, "finding": s.finding} for s in verdict.scores],
        "difference_rms": verdict.difference,
        "tokens_replayed": verdict.tokens,
        "lost_engines": verdict.lost_engines,
        "compared": {**asdict(total), "mean": total.mean},
        "rows": [
            {
                "sample_id": row.sample_id,
                "chosen": "drawn" if row.is_drawn else "worst",
                "prompt_tokens": row.prompt_tokens,
                "response_tokens": row.responses.tolist(),
                "compared": row.counts.tolist(),
                "rollout_logprobs": row.rollout_logprobs.tolist(),
                "old_logprobs": row.old_logprobs.tolist(),
                "alone": row.alone.tolist(),
            }
            for row in rows
        ],
    }


def _of_row(row: ReplayedRow) -> tuple[float, float, int]:
    """(mean, largest, where) of |difference| over the tokens compared."""
    apart = torch.where(row.counts, (row.rollout_logprobs - row.old_logprobs).abs(), 0.0)
    at = int(apart.nan_to_num(nan=torch.inf).argmax())
    return float(apart.sum() / row.counts.sum().clamp(min=1)), float(apart[at]), at
