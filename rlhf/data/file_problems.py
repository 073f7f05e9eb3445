"""Prompts from a file of rows."""

from array import array
from heapq import nsmallest
from pathlib import Path

from rlhf.config.data import DataConfig
from rlhf.data.permutation import permuted, stable_hash
from rlhf.data.problems import DataReport
from rlhf.data.prompt_encoder import Prompt, PromptEncoder
from rlhf.data.row_files import open_rows
from rlhf.data.rows import BadRowError, Row, content_key, row_of
from rlhf.errors import DataError

MAX_EXAMPLES = 10


class FileProblems:
    """Rows of a JSONL or Parquet file. Bad rows are counted and skipped; 16 bytes of memory a row, no text.

    The held-out rows are those whose content hashes lowest, so they depend on neither the seed nor the file's order;
    every row with the content of a held-out one is left out of training.
    """

    def __init__(self, config: DataConfig, encoder: PromptEncoder, *, seed: int, need_answers: bool) -> None:
        """Scan the file.

        Args:
            config: Its source is jsonl or parquet.
            encoder: Decides what is overlong.
            seed: Of the order of rows.
            need_answers: A row without an answer is bad.

        Raises:
            DataError: No such file, no good row in it, too few for held_out, or an overlong row under overlong=error.
        """
        self.config, self.encoder, self.seed, self.need_answers = config, encoder, seed, need_answers
        self.file = open_rows(config.source, Path(config.path))
        self.rows = self.bad = self.overlong = 0
        self.examples: list[str] = []
        positions, keys = self._scan()
        if not positions:
            raise DataError(
                f"{config.path}: no usable row among {self.rows} ({self.bad} bad, {self.overlong} overlong"
                f"{'; first ' + self.examples[0] if self.examples else ''}); needs rows with a prompt under "
                f"data.prompt_key={config.prompt_key} of at most {config.max_prompt_tokens} tokens"
            )
        self.positions, self.held_positions, self.repeats = self._set_apart(positions, keys)

    def train(self, position: int) -> Prompt:
        """As Problems."""
        epoch, index = divmod(position, len(self.positions))
        if self.config.shuffle:
            index = permuted(index, len(self.positions), stable_hash("order", self.seed, epoch))
        return self._prompt(self.positions[index])

    def held_out(self) -> tuple[Prompt, ...]:
        """As Problems."""
        return tuple(self._prompt(position) for position in self.held_positions)

    def report(self) -> DataReport:
        """As Problems."""
        return DataReport(
            source=self.config.path,
            rows=self.rows,
            usable=len(self.positions),
            held_out=len(self.held_positions),
            bad=self.bad,
            overlong=self.overlong,
            repeats=self.repeats,
            examples=tuple(self.examples),
        )

    def _prompt(self, position: int) -> Prompt:
        try:
            return self.encoder.encode(self._row(self.file.read(position)))
        except (BadRowError, ValueError) as error:  # ValueError: of JSON and of UTF-8
            raise DataError(
                f"{self.config.path}: the row at byte {position} was good when the run began and is not now ({error}); "
                "needs a file that stays as it is; start again"
            ) from error

    def _row(self, entry: object) -> Row:
        row = row_of(entry, prompt_key=self.config.prompt_key, answer_key=self.config.answer_key)
        if self.need_answers and not row.answer:
            raise BadRowError(f"no answer under {self.config.answer_key!r}")
        return row

    def _scan(self) -> tuple[array, array]:
        positions, keys = array("q"), array("Q")
        for position, where, entry in self.file.scan():
            self.rows += 1
            try:
                if isinstance(entry, BadRowError):
                    raise entry
                row = self._row(entry)
                too_long = self.encoder.overlong(row.prompt)
            except BadRowError as error:
                self.bad += 1
                if len(self.examples) < MAX_EXAMPLES:
                    self.examples.append(f"{where}: {error}")
                continue
            if too_long and self.config.overlong == "error":
                raise DataError(
                    f"{where}: the prompt has more than data.max_prompt_tokens = {self.config.max_prompt_tokens} "
                    "tokens; raise it, or set data.overlong=drop or truncate"
                )
            if too_long and self.config.overlong == "drop":
                self.overlong += 1
                continue
            positions.append(position)
            keys.append(content_key(row.prompt))
        return positions, keys

    def _set_apart(self, positions: array, keys: array) -> tuple[array, array, int]:
        first: dict[int, int] = {}
        for position, key in zip(positions, keys, strict=True):
            first.setdefault(key, position)
        held = self.config.held_out
        if held >= len(first):
            raise DataError(
                f"data.held_out: {held} of {len(first)} distinct prompts in {self.config.path} leave none to train on; "
                f"set data.held_out below {len(first)}"
            )
        apart = set(nsmallest(held, first))
        kept = array("q", (p for p, key in zip(positions, keys, strict=True) if key not in apart))
        return kept, array("q", sorted(first[key] for key in apart)), len(positions) - len(kept) - len(apart)
