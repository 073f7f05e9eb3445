"""What tells a source of prompts from another one."""

from dataclasses import replace

import pytest

from rlhf.config.data import DataConfig
from rlhf.data.fingerprint import fingerprint


def test_a_file_is_known_by_its_bytes_and_not_by_its_name(tmp_path):
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    files[0].write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
    files[1].write_text(files[0].read_text())
    files[2].write_text(files[0].read_text().replace("1+2", "2+1"))  # as long
    of = [fingerprint(DataConfig(source="jsonl", path=str(file)), seed=1) for file in files]
    assert of[0] == of[1]
    assert of[0].items == of[2].items == files[0].stat().st_size
    assert of[0].content != of[2].content


@pytest.mark.parametrize("change", [{"task_options": {"min_terms": 3, "max_terms": 3}}, {"task": "gcd"}])
def test_a_task_is_known_by_its_problems(change):
    config = DataConfig(source="reasoning_gym", task="chain_sum", task_size=100)
    assert fingerprint(config, seed=1) == fingerprint(config, seed=1)
    assert fingerprint(config, seed=1) != fingerprint(config, seed=2)
    assert fingerprint(config, seed=1) != fingerprint(replace(config, **change), seed=1)
