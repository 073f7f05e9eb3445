"""Rows as they lie in the Parquet file."""

from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from rlhf.data.record import RewardResult
from rlhf.trainers.sample_dump import SampleDump
from rlhf.trainers.sample_table import SampleRows
from tests.trainers.test_experience import experience


def test_columns_have_types_that_readers_know() -> None:
    table = SampleRows.of(experience(), ["a", "b"]).to_arrow(3)
    types = {field.name: str(field.type) for field in table.schema}
    assert (types["sample_id"], types["prompt"], types["score"]) == ("int64", "string", "float")
    assert (types["response_tokens"], types["loss_mask"]) == ("list<item: int32>", "list<item: bool>")
    assert types["reward_parts"] == "map<string, double>"
    assert (table.num_rows, len(SampleRows.empty().to_arrow(3))) == (2, 0)
    assert SampleRows.empty().to_arrow(3).schema == table.schema


def test_parts_errors_and_words_come_through() -> None:
    found = experience(valid=(True, False))
    results = (RewardResult(1.0, parts=(("right", 1.0), ("brief", 0.5))), RewardResult(0.0, error="it raised"))
    scored = replace(found.shaped.scored, results=results)
    found = replace(found, shaped=replace(found.shaped, scored=scored))
    first, second = SampleRows.of(found, ["\u00e9 \n", ""]).to_arrow(1).to_pylist()
    assert (first["reward_parts"], first["error"]) == ([("right", 1.0), ("brief", 0.5)], "")
    assert (first["response"], first["finish_reason"]) == ("\u00e9 \n", "stop")
    assert (second["reward_parts"], second["error"], second["valid"]) == ([], "it raised", False)
    assert second["advantage_mean"] is None  # no token of the row counts


def test_a_file_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path) -> None:
    class Folder:
        def sample_dump(self, step: int):
            return tmp_path / "no" / "such" / "folder" / "a.parquet"

    told: list[str] = []
    dump = SampleDump(1, rank=0, group=None, scorer=None, folder=Folder(), on_failure=told.append)
    dump._write(1, SampleRows.empty())
    assert len(told) == 1
    assert "a.parquet: not written (FileNotFoundError" in told[0]


def test_a_column_of_another_length_is_refused() -> None:
    rows = SampleRows.of(experience(), ["a", "b"])
    assert isinstance(rows.select(torch.tensor([1])).to_arrow(1), pa.Table)
    with pytest.raises(ValueError, match="scores has 1"):
        replace(rows, scores=torch.zeros(1))
