"""Looks at each step whether engines and trainer agree; when they do not, finds out why and acts by policy."""

from collections.abc import Callable

from rlhf.config.mismatch import MismatchConfig
from rlhf.data.batch import Rollout
from rlhf.data.ragged import Ragged
from rlhf.dist.agree import from_first, gather
from rlhf.errors import MismatchError
from rlhf.metrics.names import MismatchMetrics
from rlhf.metrics.run_folder import RunFolder
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.mismatch.evidence import ReplayedRow
from rlhf.trainers.mismatch.replay import Replays
from rlhf.trainers.mismatch.report import as_record, as_text
from rlhf.trainers.mismatch.tally import Tally
from rlhf.trainers.mismatch.verdict import Verdict, judge, stale


class MismatchWatch:
    """One a run, on every rank of the job; all call it alike."""

    def __init__(
        self, config: MismatchConfig, replays: Replays, *, dtype: str, folder: RunFolder, note: Callable[[str], None]
    ) -> None:
        """Keep the parts.

        Args:
            config: Limits and policy.
            replays: What a triage may ask.
            dtype: Of the actor.
            folder: Where rank 0 writes what was found.
            note: Says something on rank 0's console; does nothing elsewhere.
        """
        self._config, self._replays, self._folder, self._note = config, replays, folder, note
        self._limits = config.limits(dtype).at(replays.sampling.temperature)
        self._breaches = 0

    def look(
        self, rollout: Rollout, old_logprobs: Ragged, state: DriverState, *, left_out: bool, begun_tokens: int = 0
    ) -> MismatchMetrics:
        """Compare the log-probs of this rank's rows with the trainer's; the same numbers on every rank.

        To be called while trainer and engines hold the same weights: after the sync and before the update. Collective
        over the job. `left_out`: this rank's engine is known to hold wrong weights. `begun_tokens`: what this rank has
        kept of responses that earlier steps began.

        Raises:
            MismatchError: A limit is passed and the policy is to stop. On all ranks, once the record is written or has
                turned out not to be writable; it says which.
        """
        mine = Tally.of(rollout, old_logprobs.values, state.policy_version, begun_tokens=begun_tokens)
        tallies = gather(mine, self._replays.group)
        total = sum(tallies, Tally())
        breach = total.breach(self._limits)
        if breach:
            self._breaches += 1
            stops = self._config.on_breach == "stop"
            if stops or not self._breaches & (self._breaches - 1):  # 1, 2, 4, 8, ...: a triage takes a while
                self._find_cause(rollout, old_logprobs, state, total, breach, left_out=left_out, stops=stops)
        return total.metrics(breach=bool(breach))

    def _find_cause(
        self,
        rollout: Rollout,
        old_logprobs: Ragged,
        state: DriverState,
        total: Tally,
        breach: str,
        *,
        left_out: bool,
        stops: bool,
    ) -> None:
        """Triage, record, console; then the end of the run if it is to stop. Collective over the job."""
        step = state.step + 1
        rows: tuple[ReplayedRow, ...] = ()
        if total.is_stale:
            verdict: Verdict | None = stale(total.other_tokens, state.policy_version)
        else:
            evidence = self._replays.gather(
                rollout,
                old_logprobs,
                policy_version=state.policy_version,
                step_mean=total.mean,
                rows=self._config.replay_rows,
                seed=f"{state.seed} mismatch {step}",
                left_out=left_out,
            )
            verdict, rows = judge(evidence) if self._replays.rank == 0 else None, evidence.rows
        summary = ""
        if verdict is not None and self._replays.rank == 0:
            text = as_text(step, breach, total, verdict, rows)
            seen = self._write(step, as_record(step, breach, total, verdict, rows), text)
            summary = f"{verdict.name}: {verdict.finding}; {verdict.advice}; what was seen {seen}"
        summary = from_first(summary, self._replays.group)
        if stops:
            raise MismatchError(
                f"mismatch: step {step}: {breach}; cause: {summary}; mismatch.on_breach=warn goes on all the same"
            )

    def _write(self, step: int, record: dict[str, object], text: str) -> str:
        """Record and console, on rank 0; says where it is written.

        A disk that takes nothing costs the record alone: the other ranks wait for the verdict.
        """
        path = self._folder.mismatch(step, "txt")
        try:
            self._folder.write_mismatch(step, record, text)
            seen = f"is written to {path}"
        except OSError as error:
            seen = f"could not be written to {path} ({type(error).__name__}: {error})"
        self._note(f"{text}\n  what was seen {seen}")
        return seen
