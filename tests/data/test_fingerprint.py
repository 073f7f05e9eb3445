"""What tells a source of prompts from another one."""

import json
from dataclasses import replace

import pytest

from rlhf.config.data import DataConfig
from rlhf.data.fingerprint import fingerprint, tokenizer_hash


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


def test_a_tokenizer_is_known_by_what_it_does_to_text(tmp_path):
    tokenizer = {"version": "1.0", "padding": None, "model": {"vocab": {"a": 0, "b": 1}}}

    def of(*, with_template: bool = True, template: str = "{{ x }}", **parts: object) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**tokenizer, **parts}, indent=len(parts)))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return tokenizer_hash(tmp_path, with_template=with_template)

    assert of() == of(padding={"length": 8}, version="1.1")
    assert of() != of(model={"vocab": {"a": 1, "b": 0}})
    assert of() != of(template="{{ y }}")
    assert of(with_template=False) == of(with_template=False, template="{{ y }}")
    held = of()
    (tmp_path / "chat_template.jinja").write_text("{{ z }}")
    assert of() != held


def test_a_tokenizer_of_other_files_is_known_by_their_bytes(tmp_path):
    of = []
    for word in (b"ab", b"ac"):
        (tmp_path / "tokenizer.model").write_bytes(word)
        of.append(tokenizer_hash(tmp_path, with_template=False))
    assert of[0] != of[1]
