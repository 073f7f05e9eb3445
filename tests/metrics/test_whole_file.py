"""Files are whole or as they were."""

import pytest

from rlhf.metrics.whole_file import write_whole


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"


def test_lines_may_come_one_after_another(tmp_path):
    path = tmp_path / "a.jsonl"
    write_whole(path, "1\n2\n3\n")
    with path.open() as old:
        write_whole(path, (line for line in old if line != "2\n"))
    assert path.read_text() == "1\n3\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
