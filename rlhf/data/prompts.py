"""The prompts of each step, by rule: any owner can name the rows of any step without asking anyone.

Prompt p of a step belongs to owner p % num_owners, with all its samples. Knows no process group: an owner is a number.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlhf.config.data import DataConfig
from rlhf.data.batch import PromptBatch, Sequences
from rlhf.data.file_problems import FileProblems
from rlhf.data.problems import DataReport, Problems
from rlhf.data.prompt_encoder import Prompt, PromptEncoder
from rlhf.data.ragged import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_HELD_OUT_ID = 2**48
"""Sample and prompt ids of held-out rows begin here, above any that training reaches."""


def open_problems(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", *, seed: int, need_answers: bool = False
) -> Problems:
    """The source that data.source names.

    Raises:
        ConfigError: Settings that do not fit the tokenizer or the task.
        DataError: A file that is missing or has no usable row, or too few problems for held_out.
    """
    encoder = PromptEncoder(tokenizer, config)
    if config.source == "reasoning_gym":
        from rlhf.data.gym_problems import GymProblems  # noqa: PLC0415  # a hundred task modules take seconds to import

        return GymProblems(config, encoder, seed=seed, need_answers=need_answers)
    return FileProblems(config, encoder, seed=seed, need_answers=need_answers)


class PromptSource:
    """Prompts to be answered, from any position on, in any order, again and again: the same numbers, the same rows."""

    def __init__(self, problems: Problems, *, prompts_per_step: int, samples_per_prompt: int) -> None:
        self.problems = problems
        self.prompts_per_step, self.samples_per_prompt = prompts_per_step, samples_per_prompt

    def rows_of(self, first: int, owner: int, num_owners: int) -> PromptBatch:
        """Rows of one owner in the step whose prompts begin at a position of the stream, ordered by sample id.

        Prompt p of the step has prompt id first + p, and its sample k has sample id (first + p) * samples_per_prompt +
        k. May have no rows.
        """
        return self.rows([first + p for p in range(owner, self.prompts_per_step, num_owners)])

    def rows(self, prompt_ids: Sequence[int]) -> PromptBatch:
        """Rows of prompts by their places in the stream, in this order; ids as in rows_of."""
        prompts = [self.problems.train(i) for i in prompt_ids]
        return prompt_batch(list(prompt_ids), prompts, self.samples_per_prompt)

    def held_out(self, owner: int, num_owners: int, *, samples: int = 1) -> PromptBatch:
        """Rows of one owner among the held-out prompts, so many samples each; ids begin at FIRST_HELD_OUT_ID."""
        prompts = self.problems.held_out()
        mine = range(owner, len(prompts), num_owners)
        return prompt_batch([FIRST_HELD_OUT_ID + i for i in mine], [prompts[i] for i in mine], samples)

    def report(self) -> DataReport:
        """What became of the source's rows."""
        return self.problems.report()


class AnswerSource:
    """Prompts with their reference answers, to learn from directly."""

    def __init__(
        self, problems: Problems, tokenizer: "PreTrainedTokenizerBase", *, batch_samples: int, eos_token_id: int
    ) -> None:
        """Take problems that were opened with need_answers=True, and the token that ends an answer."""
        self.problems, self.tokenizer = problems, tokenizer
        self.batch_samples, self.eos_token_id = batch_samples, eos_token_id

    def rows_of(self, step: int, owner: int, num_owners: int) -> Sequences:
        """Rows of one owner in a step (counted from 0): prompt, answer and end token; the last two are the response.

        Row p of the step belongs to owner p % num_owners and has sample id step * batch_samples + p. May have no rows.
        """
        first = step * self.batch_samples
        return self._sequences([(first + p, self.problems.train(first + p)) for p in self._mine(owner, num_owners)])

    def held_out(self, owner: int, num_owners: int) -> Sequences:
        """Rows of one owner among the held-out ones; ids begin at FIRST_HELD_OUT_ID."""
        prompts = self.problems.held_out()
        return self._sequences([(FIRST_HELD_OUT_ID + i, prompts[i]) for i in range(owner, len(prompts), num_owners)])

    def report(self) -> DataReport:
        """What became of the source's rows."""
        return self.problems.report()

    def _mine(self, owner: int, num_owners: int) -> range:
        return range(owner, self.batch_samples, num_owners)

    def _sequences(self, rows: list[tuple[int, Prompt]]) -> Sequences:
        answers = [
            [*self.tokenizer(prompt.record.answer, add_special_tokens=False).input_ids, self.eos_token_id]
            for _, prompt in rows
        ]
        tokens = [torch.tensor([*prompt.token_ids, *answer]) for (_, prompt), answer in zip(rows, answers, strict=True)]
        return Sequences(
            sample_ids=torch.tensor([sample_id for sample_id, _ in rows], dtype=torch.int64),
            tokens=Ragged.of(tokens, dtype=torch.int64),
            response_lengths=torch.tensor([len(answer) for answer in answers], dtype=torch.int64),
        )


def prompt_batch(prompt_ids: list[int], prompts: list[Prompt], samples: int) -> PromptBatch:
    """Each prompt `samples` times, one after the other; sample id = prompt id * samples + k."""
    ids = torch.tensor(prompt_ids, dtype=torch.int64).repeat_interleave(samples)
    tokens = [torch.tensor(prompt.token_ids, dtype=torch.int64) for prompt in prompts for _ in range(samples)]
    return PromptBatch(
        sample_ids=ids * samples + torch.arange(samples).repeat(len(prompts)),
        prompt_ids=ids,
        tokens=Ragged.of(tokens, dtype=torch.int64),
        records=tuple(prompt.record for prompt in prompts for _ in range(samples)),
    )
