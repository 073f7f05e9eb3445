import pyarrow
import pytest
from pyarrow import parquet

from rlhf.data.file_problems import FileProblems
from rlhf.data.prompt_encoder import PromptEncoder
from rlhf.data.prompts import open_problems
from rlhf.errors import ConfigError, DataError
from tests.data.sources import byte_tokenizer, file_config, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("chat"), chat=True)


def rows(n):
    return [{"prompt": f"question {i}", "answer": str(i), "level": i % 3} for i in range(n)]


def texts(problems, n, first=0):
    return [problems.train(i).record.text for i in range(first, first + n)]


def opened(tokenizer, path, *, seed=1, need_answers=False, **options):
    return open_problems(file_config(path, **options), tokenizer, seed=seed, need_answers=need_answers)


def test_an_epoch_holds_every_row_once_and_each_epoch_and_seed_has_its_order(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", rows(13))
    problems = opened(tokenizer, path)
    epochs = [texts(problems, 13, first=13 * e) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(row["prompt"] for row in rows(13))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert texts(opened(tokenizer, path, seed=2), 13) != epochs[0]
    assert texts(opened(tokenizer, path), 13) == epochs[0]


def test_without_shuffle_the_file_order_repeats(tokenizer, tmp_path):
    problems = opened(tokenizer, write_jsonl(tmp_path / "a.jsonl", rows(3)), shuffle=False)
    assert texts(problems, 5) == ["question 0", "question 1", "question 2", "question 0", "question 1"]


def test_parquet_and_jsonl_give_the_same_prompts(tokenizer, tmp_path):
    table = rows(11)
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet", row_group_size=4)
    lines = opened(tokenizer, write_jsonl(tmp_path / "a.jsonl", table), held_out=3)
    columns = opened(tokenizer, tmp_path / "a.parquet", held_out=3)
    assert [lines.train(i) for i in range(20)] == [columns.train(i) for i in range(20)]
    assert lines.held_out() == columns.held_out()
    assert lines.train(0).record.entry["level"] in (0, 1, 2)


def test_held_out_contents_are_in_no_training_row_whatever_the_seed_and_order(tokenizer, tmp_path):
    # Contents 0..9 three times over, some with other white space.
    table = [{"prompt": f"question {i % 10}" + " " * (i // 20), "answer": str(i)} for i in range(30)]
    held = []
    for seed, path in (
        (1, write_jsonl(tmp_path / "a.jsonl", table)),
        (5, write_jsonl(tmp_path / "b.jsonl", table[::-1])),
    ):
        problems = opened(tokenizer, path, seed=seed, held_out=4)
        held.append({prompt.record.text.strip() for prompt in problems.held_out()})
        assert len(problems.held_out()) == len(held[-1]) == 4
        trained = {text.strip() for text in texts(problems, 60)}
        assert len(trained) == 6
        assert not trained & held[-1]
        assert problems.report().repeats == 8
    assert held[0] == held[1]


def test_bad_rows_are_counted_with_file_and_line_and_skipped(tokenizer, tmp_path):
    table = [
        {"prompt": "good one"},
        "{broken",
        {"question": "other key"},
        {"prompt": 7},
        "",
        {"prompt": "  "},
        [1, 2],
        {"prompt": "good two", "answer": {"no": "text"}},
        {"prompt": [{"role": "user", "content": "a chat"}]},
        {"prompt": "good three", "answer": 12.5},
    ]
    problems = opened(tokenizer, write_jsonl(tmp_path / "a.jsonl", table))
    report = problems.report()
    assert (report.rows, report.usable, report.bad) == (9, 2, 7)
    assert set(texts(problems, 2)) == {"good one", "good three"}
    told = dict(example.removeprefix(f"{tmp_path}/a.jsonl:").split(": ", 1) for example in report.examples)
    assert sorted(map(int, told)) == [2, 3, 4, 6, 7, 8, 9]
    assert told["2"].startswith("not JSON")
    assert told["3"] == "no field 'prompt'; it has 'question'"
    assert "chat_template is false" in told["9"]


def test_broken_utf8_is_one_bad_row(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "ok"}\n{"prompt": "\xff\xfe"}\n')
    report = opened(tokenizer, tmp_path / "a.jsonl").report()
    assert (report.usable, report.bad) == (1, 1)
    assert "a.jsonl:2: not UTF-8" in str(report)


def test_a_file_without_a_good_row_is_refused_with_an_example(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(DataError, match=r"no usable row among 1 .*a\.jsonl:1: no field 'prompt'"):
        opened(tokenizer, path)


def test_missing_and_wrong_files_are_refused(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl is not there"):
        opened(tokenizer, tmp_path / "none.jsonl")
    write_jsonl(tmp_path / "a.parquet", rows(2))
    with pytest.raises(DataError, match="no readable Parquet file"):
        opened(tokenizer, tmp_path / "a.parquet")


def test_overlong_rows_are_dropped_cut_or_fatal_by_policy(tokenizer, tmp_path):
    table = [{"prompt": "x" * 20}, {"prompt": "y" * 19 + "Z" * 2}, {"prompt": "é" * 10}, {"prompt": "é" * 11}]
    path = write_jsonl(tmp_path / "a.jsonl", table)
    dropped = opened(tokenizer, path, max_prompt_tokens=20)
    assert set(texts(dropped, 4)) == {"x" * 20, "é" * 10}
    assert dropped.report().overlong == 2
    cut = opened(tokenizer, path, max_prompt_tokens=20, overlong="truncate", shuffle=False)
    assert texts(cut, 2) == ["x" * 20, "y" * 18 + "ZZ"]
    assert all(len(cut.train(i).token_ids) == 20 for i in range(4))
    with pytest.raises(DataError, match=r"a\.jsonl:2: the prompt has more than data\.max_prompt_tokens = 20"):
        opened(tokenizer, path, max_prompt_tokens=20, overlong="error")


def test_held_out_must_leave_something_to_train_on(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"set data\.held_out below 3"):
        opened(tokenizer, write_jsonl(tmp_path / "a.jsonl", rows(3) * 2), held_out=3)


def test_rows_without_answer_are_bad_only_where_answers_are_needed(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b", "answer": "c"}])
    assert opened(tokenizer, path).report().usable == 2
    assert opened(tokenizer, path, need_answers=True).report().usable == 1


def test_chats_go_through_the_template(chat_tokenizer, tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "?"}]
    table = [{"prompt": "plain"}, {"prompt": chat}, {"prompt": chat[:2]}]
    path = write_jsonl(tmp_path / "a.jsonl", table)
    problems = opened(chat_tokenizer, path, chat_template=True, system_prompt="S", shuffle=False)
    assert texts(problems, 2) == [
        "<system>S<user>plain<assistant>",
        "<system>S<user>hi<assistant>yo<user>?<assistant>",
    ]
    assert len(problems.train(0).token_ids) == len("<system>S<user>plain<assistant>")
    assert problems.report().examples[0].endswith("there is nothing to answer")


def test_the_template_counts_towards_the_length(chat_tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "12345"}, {"prompt": "123456"}])
    problems = opened(chat_tokenizer, path, chat_template=True, max_prompt_tokens=len("<user>12345<assistant>"))
    assert texts(problems, 1) == ["<user>12345<assistant>"]
    assert problems.report().overlong == 1


def test_a_template_that_is_not_there_is_refused_with_the_cure(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", rows(2))
    with pytest.raises(ConfigError, match=r"set data\.chat_template=false"):
        opened(tokenizer, path, chat_template=True)
    with pytest.raises(ConfigError, match=r"data\.system_prompt"):
        opened(tokenizer, path, system_prompt="be brief")


def test_a_template_that_refuses_the_system_prompt_is_refused_at_once(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "t", chat=True)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    path = write_jsonl(tmp_path / "a.jsonl", rows(2))
    assert texts(opened(tokenizer, path, chat_template=True, shuffle=False), 1) == ["<user>question 0<assistant>"]
    with pytest.raises(ConfigError, match=r"no system role .*set data\.system_prompt= to nothing"):
        opened(tokenizer, path, chat_template=True, system_prompt="S")


def test_a_file_that_changes_under_the_run_is_named(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", rows(3))
    problems = opened(tokenizer, path, shuffle=False)
    path.write_bytes(b"xx" + path.read_bytes())
    with pytest.raises(DataError, match=r"a\.jsonl: the row at byte 0 was good when the run began"):
        problems.train(0)


def test_positions_hold_no_text(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * 5000, "answer": str(i)} for i in range(50)])
    config = file_config(path, max_prompt_tokens=9000)
    problems = FileProblems(config, PromptEncoder(tokenizer, config), seed=1, need_answers=False)
    assert problems.positions.itemsize * len(problems.positions) == 400
