"""What an engine owes its feed: rows taken and not yet given back, on the engine's leader. Knows no engine."""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason, PromptBatch, Provenance, Rollout
from rlhf.data.ragged import Ragged
from rlhf.errors import EngineError
from rlhf.rollout.admission import check_fits, check_vocabulary
from rlhf.rollout.feed import Load, Work
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.seeds import sample_seed


@dataclass(frozen=True, slots=True)
class ResponsePart:
    """Consecutive tokens of one response, on the CPU; all of one length."""

    tokens: Tensor
    """int64."""
    logprobs: Tensor
    """float32."""
    provenance: Tensor
    """uint8."""
    versions: Tensor
    """int32."""

    @staticmethod
    def sampled(tokens: Tensor, logprobs: Tensor, version: int) -> "ResponsePart":
        """Tokens that the weights of one version sampled."""
        count = tokens.numel()
        return ResponsePart(
            tokens,
            logprobs,
            torch.full((count,), Provenance.SAMPLED, dtype=torch.uint8),
            torch.full((count,), version, dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True, eq=False)
class OwedRow:
    """A row that must come back."""

    number: int
    """Of the run, in the order of taking."""
    work: Work
    place: int
    """In the work."""
    prompt: Tensor
    """int64, on the CPU."""
    begun: ResponsePart | None
    """None where there is no token of it yet."""
    seed: int

    @property
    def sample_id(self) -> int:
        """For messages."""
        return int(self.work.prompts.sample_ids[self.place])

    @property
    def num_begun(self) -> int:
        """Tokens that it came with."""
        return 0 if self.begun is None else self.begun.tokens.numel()


class Ledger:
    """Rows of one run of an engine, on its leader: checked as they come, put together as they end."""

    def __init__(
        self,
        sampling: SamplingConfig,
        *,
        vocab_size: int,
        kv_cache_tokens: int,
        run_seed: int,
        policy_version: int,
        where: str,
        performance: PerformanceMonitor | None = None,
    ) -> None:
        self._vocab_size, self._kv_cache_tokens, self._run_seed = vocab_size, kv_cache_tokens, run_seed
        self._max_new_tokens, self._version, self._where = sampling.max_new_tokens, policy_version, where
        self._performance = performance
        self._owed: dict[int, OwedRow] = {}
        self._ended: list[tuple[OwedRow, ResponsePart | None, FinishReason]] = []
        self._tokens_left = 0
        self.num_taken = self.num_finished = 0
        """Rows since the run began; the second counts what `finished` has given."""

    def check(self, prompts: PromptBatch) -> None:
        """Raise EngineError unless every row can be answered."""
        tokens, sample_ids = prompts.tokens, prompts.sample_ids
        check_vocabulary(
            tokens.values.cpu(), tokens.lengths, sample_ids, vocab_size=self._vocab_size, where=self._where
        )
        for count, sample_id in zip(tokens.lengths.tolist(), sample_ids.tolist(), strict=True):
            check_fits(count, self._max_new_tokens, self._kv_cache_tokens, sample_id=sample_id, where=self._where)

    def take(self, work: Work) -> list[OwedRow]:
        """Rows that are to be answered; those that are complete already are among the `finished` at once.

        Raises:
            EngineError: A row that the engine cannot answer, by sample id.
        """
        self.check(work.prompts)
        begun = self._begun(work)
        prompts = work.prompts.tokens.to(torch.device("cpu")).rows()
        rows = []
        for place, (prompt, part, sample_id) in enumerate(
            zip(prompts, begun, work.prompts.sample_ids.tolist(), strict=True)
        ):
            seed = sample_seed(self._run_seed, sample_id, work.attempt)
            row = OwedRow(self.num_taken, work, place, prompt, part, seed)
            reason = FinishReason.ABORT if work.begun is None else FinishReason(int(work.begun.finish_reasons[place]))
            if reason == FinishReason.ABORT and row.num_begun >= self._max_new_tokens:
                reason = FinishReason.LENGTH
            if reason == FinishReason.ABORT:
                self._owed[row.number] = row
                self._tokens_left += self._max_new_tokens - row.num_begun
                rows.append(row)
            else:
                self._ended.append((row, None, reason))
            self.num_taken += 1
        if self._performance is not None:
            self._performance.submitted(row.sample_id for row in rows)
        return rows

    def began(self, numbers: list[int], *, at: float | None = None) -> None:
        """The engine works on rows from now on, or from a time of the monitor's clock on."""
        if self._performance is not None:
            self._performance.begun((self._owed[number].sample_id for number in numbers), at=at)

    def have_first_token(self, numbers: list[int], *, at: float | None = None) -> None:
        """Rows got the first token that they did not come with."""
        if self._performance is not None:
            self._performance.first_token((self._owed[number].sample_id for number in numbers), at=at)

    def give_up(self) -> None:
        """The run has failed: what is owed will not come."""
        if self._performance is not None:
            self._performance.forget(row.sample_id for row in self._owed.values())

    def end(
        self,
        number: int,
        tokens: Tensor,
        logprobs: Tensor,
        reason: FinishReason,
        *,
        cached_tokens: int = 0,
        at: float | None = None,
    ) -> None:
        """A row has ended with these new tokens (int64 and float32, on the CPU).

        cached_tokens: Of what it came with, whose keys and values were not computed for it.
        at: When, by the monitor's clock; now if not given.

        Raises:
            EngineError: A log-prob is not finite.
        """
        row = self._owed.pop(number)
        if self._performance is not None:
            self._performance.ended(
                row.sample_id,
                prompt_tokens=row.prompt.numel() + row.num_begun,
                response_tokens=tokens.numel(),
                cached_tokens=cached_tokens,
                at=at,
            )
        self._tokens_left -= self._max_new_tokens - row.num_begun
        if not bool(logprobs.isfinite().all()):
            raise EngineError(
                f"{self._where}: sample {row.sample_id} got a log-prob that is not finite; needs finite weights; look "
                f"at the update before policy version {self._version}"
            )
        self._ended.append((row, ResponsePart.sampled(tokens, logprobs, self._version), reason))

    def owed(self) -> list[OwedRow]:
        """Rows that have not ended, in the order of taking."""
        return list(self._owed.values())

    def row(self, number: int) -> OwedRow:
        """A row that has not ended."""
        return self._owed[number]

    def load(self, *, new_tokens: int) -> Load:
        """What is owed; `new_tokens`: those that rows which have not ended got since they were taken."""
        return Load(len(self._owed), self._tokens_left - new_tokens)

    def finished(self) -> Rollout | None:
        """Rows that ended since the last call, in the order of ending; None where there are none."""
        if not self._ended:
            return None
        ended, self._ended = self._ended, []
        self.num_finished += len(ended)
        by_work = groupby((row for row, _, _ in ended), key=lambda row: id(row.work))
        prompts = [
            rows[0].work.prompts.select(torch.tensor([row.place for row in rows]))
            for rows in (list(group) for _, group in by_work)
        ]
        whole = [[part for part in (row.begun, new) if part is not None] for row, new, _ in ended]
        lengths = torch.tensor([sum(part.tokens.numel() for part in parts) for parts in whole], dtype=torch.int64)
        parts = [part for of_row in whole for part in of_row]

        def joined(columns: list[Tensor], dtype: torch.dtype) -> Ragged:
            return Ragged(torch.cat(columns) if columns else torch.empty(0, dtype=dtype), lengths)

        return Rollout(
            prompts=prompts[0] if len(prompts) == 1 else PromptBatch.concat(prompts),
            responses=joined([part.tokens for part in parts], torch.int64),
            rollout_logprobs=joined([part.logprobs for part in parts], torch.float32),
            finish_reasons=torch.tensor([reason for _, _, reason in ended], dtype=torch.int8),
            provenance=joined([part.provenance for part in parts], torch.uint8),
            policy_versions=joined([part.versions for part in parts], torch.int32),
        )

    def _begun(self, work: Work) -> list[ResponsePart | None]:
        if work.begun is None:
            return [None] * len(work.prompts)
        begun, responses = work.begun, work.begun.responses
        check_vocabulary(
            responses.values,
            responses.lengths,
            work.prompts.sample_ids,
            vocab_size=self._vocab_size,
            where=f"{self._where}: a response that was begun",
        )
        columns = (responses, begun.rollout_logprobs, begun.provenance, begun.policy_versions)
        parts = [ResponsePart(*row) for row in zip(*(column.rows() for column in columns), strict=True)]
        return [part if part.tokens.numel() else None for part in parts]
