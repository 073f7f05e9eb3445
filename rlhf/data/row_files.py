"""Files of rows: scanned once from first to last, then read at any position."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow
from pyarrow import parquet

from rlhf.data.rows import BadRowError
from rlhf.errors import DataError


class RowFile(Protocol):
    """A file of rows."""

    def scan(self) -> Iterator[tuple[int, str, object]]:
        """(position, `file:line`, what was read or a BadRowError) of each row, in order."""
        ...

    def read(self, position: int) -> object:
        """What a good row holds; position as scan gave it."""
        ...


class JsonlFile:
    """One JSON object a line, UTF-8. Holds no text: a position is a byte offset into the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("rb")

    def scan(self) -> Iterator[tuple[int, str, object]]:
        """As RowFile; empty lines are no rows."""
        position = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield position, f"{self.path}:{number}", self._parse(line)
                position += len(line)

    def read(self, position: int) -> object:
        """As RowFile."""
        self.file.seek(position)
        return json.loads(self.file.readline())

    @staticmethod
    def _parse(line: bytes) -> object:
        try:
            return json.loads(line)
        except UnicodeDecodeError as error:
            return BadRowError(f"not UTF-8 at byte {error.start}")
        except json.JSONDecodeError as error:
            return BadRowError(f"not JSON: {error.msg} at column {error.colno}")
        except RecursionError:
            return BadRowError("JSON nested too deeply")


class ParquetFile:
    """A Parquet table, held in memory as Arrow columns; a position is a row number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.table = parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"data.path: {path} is no readable Parquet file ({str(error).splitlines()[0]}); set data.source or "
                "data.path to fit"
            ) from error

    def scan(self) -> Iterator[tuple[int, str, object]]:
        """As RowFile."""
        start = 0
        for batch in self.table.to_batches(max_chunksize=4096):
            for offset, row in enumerate(batch.to_pylist()):
                yield start + offset, f"{self.path}:{start + offset + 1}", row
            start += batch.num_rows

    def read(self, position: int) -> object:
        """As RowFile."""
        return self.table.slice(position, 1).to_pylist()[0]


def open_rows(source: str, path: Path) -> RowFile:
    """The file of rows that data.source and data.path name.

    Raises:
        DataError: There is no such file, or it is not of that kind.
    """
    check_there(source, path)
    return JsonlFile(path) if source == "jsonl" else ParquetFile(path)


def check_there(source: str, path: Path) -> None:
    """Raise DataError unless there is a file at data.path."""
    if not path.is_file():
        raise DataError(
            f"data.path: {path} is {'a folder' if path.is_dir() else 'not there'}; needs a {source} file; correct it"
        )
