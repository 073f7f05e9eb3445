"""Prompts that a reasoning_gym task generates: problem i is a function of (seed, i)."""

import difflib

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset

from rlhf.config.data import DataConfig
from rlhf.data.permutation import permuted, stable_hash
from rlhf.data.problems import DataReport
from rlhf.data.prompt_encoder import Prompt, PromptEncoder
from rlhf.data.rows import BadRowError, Row, content_key
from rlhf.errors import ConfigError, DataError

MAX_ATTEMPTS = 1000
"""A position whose problem may not be used draws another one, so many times: below 1 usable in 100 problems, the
chance to run out at a position is e^-10."""


class GymProblems:
    """Problems of one task; nothing is stored but the held-out ones.

    A training problem that asks what a held-out one asks is drawn anew, and so is one that is overlong under
    overlong=drop. A record's entry holds question, answer and metadata as reasoning_gym's scorer wants
    them, and task and task_options.
    """

    def __init__(self, config: DataConfig, encoder: PromptEncoder, *, seed: int, need_answers: bool) -> None:
        """Draw the held-out problems; their stream depends on the task alone, not on the seed.

        Args:
            config: Its source is reasoning_gym.
            encoder: Decides what is overlong.
            seed: Of the training stream.
            need_answers: A problem without an answer is drawn anew.

        Raises:
            ConfigError: No such task, or it refuses the options.
            DataError: Too few distinct problems to hold some out, or nothing is left to train on.
        """
        self.config, self.encoder, self.seed, self.need_answers = config, encoder, seed, need_answers
        self.bad = self.overlong = self.repeats = 0
        self.examples: list[str] = []
        check_task(config)
        self.streams: dict[int, ProceduralDataset] = {}
        self.held_keys: set[int] = set()
        self.held_prompts = self._draw_held_out()
        self.train(0)

    def train(self, position: int) -> Prompt:
        """As Problems."""
        epoch, index = divmod(position, self.config.task_size)
        if self.config.shuffle:
            index = permuted(index, self.config.task_size, stable_hash("order", self.seed, epoch))
        for attempt in range(MAX_ATTEMPTS):
            row = gym_row(self.config, self._stream(attempt)[index])
            if content_key(row.prompt) in self.held_keys:
                self.repeats += 1
            elif (prompt := self._usable(row)) is not None:
                return prompt
        raise DataError(
            f"data.task: {self.config.task} gave nothing to train on in {MAX_ATTEMPTS} draws ({self.repeats} asked "
            f"what a held-out problem asks, {self.overlong} were overlong, {self.bad} bad); widen data.task_options, "
            "or lower data.held_out"
        )

    def held_out(self) -> tuple[Prompt, ...]:
        """As Problems."""
        return self.held_prompts

    def report(self) -> DataReport:
        """As Problems."""
        return DataReport(
            source=f"reasoning_gym {self.config.task}",
            rows=self.config.task_size,
            usable=self.config.task_size,
            held_out=len(self.held_prompts),
            bad=self.bad,
            overlong=self.overlong,
            repeats=self.repeats,
            examples=tuple(self.examples),
        )

    def _stream(self, attempt: int) -> ProceduralDataset:
        if attempt not in self.streams:
            self.streams[attempt] = training_stream(self.config, seed=self.seed, attempt=attempt)
        return self.streams[attempt]

    def _usable(self, row: Row) -> Prompt | None:
        try:
            if self.need_answers and not row.answer:
                raise BadRowError("the problem has no answer")
            if self.config.overlong != "truncate" and self.encoder.overlong(row.prompt):
                self.overlong += 1
                if self.config.overlong == "error":
                    raise DataError(
                        f"data.task: a problem of {self.config.task} has more than data.max_prompt_tokens = "
                        f"{self.config.max_prompt_tokens} tokens; raise it, or set data.overlong=drop or truncate"
                    )
                return None
            return self.encoder.encode(row)
        except BadRowError as error:
            self.bad += 1
            if not self.examples:
                self.examples.append(f"{row.prompt!r:.80}: {error}")
            return None

    def _draw_held_out(self) -> tuple[Prompt, ...]:
        wanted, prompts = self.config.held_out, []
        if not wanted:
            return ()
        draws = 20 * wanted + 200
        seed = stable_hash("held out", self.config.task) >> 8
        stream = create_dataset(self.config.task, seed=seed, size=draws, **self.config.task_options)
        for index in range(draws):
            row = gym_row(self.config, stream[index])
            key = content_key(row.prompt)
            if key not in self.held_keys and (prompt := self._usable(row)) is not None:
                self.held_keys.add(key)
                prompts.append(prompt)
            if len(prompts) == wanted:
                return tuple(prompts)
        raise DataError(
            f"data.held_out: {wanted} asked, but {self.config.task} with these options gave only {len(prompts)} "
            f"distinct usable problems in {draws} draws ({self.overlong} overlong, {self.bad} bad); "
            "lower data.held_out or widen data.task_options"
        )


def training_stream(config: DataConfig, *, seed: int, attempt: int) -> ProceduralDataset:
    """Problems of a run's training; each attempt has others, for positions whose problem may not be used."""
    # Problem i of seed s is problem 0 of seed s + i, so seeds must be far apart: hashes are.
    far = stable_hash("train", seed, attempt) >> 8
    return create_dataset(config.task, seed=far, size=config.task_size, **config.task_options)


def gym_row(config: DataConfig, problem: dict[str, object]) -> Row:
    """A problem of reasoning_gym as a row, with all that its scorer needs."""
    answer = problem["answer"]
    entry = {**problem, "task": config.task, "task_options": dict(config.task_options)}
    return Row(str(problem["question"]), "" if answer is None else str(answer), entry)


def check_task(config: DataConfig) -> None:
    """Raise ConfigError unless reasoning_gym knows the task and takes its options."""
    if config.task not in DATASETS:
        near = difflib.get_close_matches(config.task, DATASETS, n=3)
        raise ConfigError(
            f"data.task: reasoning_gym has no {config.task!r}; "
            f"{'nearest: ' + ', '.join(near) if near else f'it has {len(DATASETS)}, such as chain_sum'}; change it"
        )
    for key in ("seed", "size"):
        if key in config.task_options:
            raise ConfigError(
                f"data.task_options.{key}: given; the run sets it itself; "
                f"remove it and use {'seed' if key == 'seed' else 'data.task_size'}"
            )
    try:
        create_dataset(config.task, seed=0, size=1, **config.task_options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"data.task_options: {config.task} refuses {config.task_options} ({type(error).__name__}: {error}); "
            f"it takes {', '.join(sorted(DATASETS[config.task][1].__dataclass_fields__))}"
        ) from error
