import pickle

import pytest

from rlhf.data.prompts import open_problems
from rlhf.errors import ConfigError, DataError
from tests.data.sources import byte_tokenizer, gym_config


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("plain"))


def opened(tokenizer, task="products", *, seed=1, need_answers=False, **options):
    return open_problems(gym_config(task, **options), tokenizer, seed=seed, need_answers=need_answers)


def test_a_position_gives_the_same_problem_in_any_order_and_any_process(tokenizer):
    one, two = opened(tokenizer), opened(tokenizer)
    backward = {i: one.train(i) for i in (900, 5, 12000, 0)}
    assert all(two.train(i) == backward[i] for i in (0, 5, 900, 12000))
    assert opened(tokenizer, seed=2).train(0) != one.train(0)


def test_training_never_asks_what_a_held_out_problem_asks(tokenizer):
    # Products of one-digit numbers: 100 distinct problems, of which 40 are held out; 400 draws would meet them all.
    problems = opened(tokenizer, held_out=40, task_options={"min_digits": 1, "max_digits": 1})
    held = {prompt.record.text for prompt in problems.held_out()}
    trained = {problems.train(i).record.text for i in range(400)}
    assert len(problems.held_out()) == len(held) == 40
    assert not held & trained
    assert len(trained) > 50
    assert problems.report().repeats > 100


def test_held_out_problems_do_not_depend_on_the_seed(tokenizer):
    assert opened(tokenizer, seed=1).held_out() == opened(tokenizer, seed=77).held_out()


def test_neighbouring_seeds_share_no_stream(tokenizer):
    # reasoning_gym seeds problem i with seed + i: raw seeds 1 and 2 would give one stream, shifted by one.
    options = {"min_digits": 5, "max_digits": 5}
    one, two = (opened(tokenizer, seed=seed, task_options=options) for seed in (1, 2))
    a, b = ({problems.train(i).record.text for i in range(100)} for problems in (one, two))
    assert not a & b


def test_an_entry_can_be_pickled_and_scored(tokenizer):
    record = opened(tokenizer, "chain_sum").train(3).record
    assert pickle.loads(pickle.dumps(record)) == record
    assert record.entry["answer"] == record.answer
    assert record.entry["task"] == record.entry["metadata"]["source_dataset"] == "chain_sum"


def test_overlong_problems_are_drawn_anew_and_counted(tokenizer):
    # "Solve the following multiplication: A * B. Give only ..." is 85 bytes with two one-digit numbers.
    problems = opened(tokenizer, held_out=5, task_options={"max_digits": 3}, max_prompt_tokens=85)
    assert all(len(problems.train(i).token_ids) <= 85 for i in range(30))
    assert problems.report().overlong > 10
    with pytest.raises(DataError, match=r"more than data\.max_prompt_tokens = 85"):
        opened(tokenizer, held_out=5, task_options={"max_digits": 3}, max_prompt_tokens=85, overlong="error")


def test_too_many_held_out_is_refused_with_the_number_found(tokenizer):
    with pytest.raises(DataError, match=r"held_out: 200 asked, but products .* gave only 100 distinct"):
        opened(tokenizer, held_out=200, task_options={"max_digits": 1})


def test_held_out_that_covers_the_task_is_refused(tokenizer):
    with pytest.raises(DataError, match="gave nothing to train on"):
        opened(tokenizer, held_out=100, task_options={"max_digits": 1})


def test_wrong_names_and_options_are_refused_before_anything_starts(tokenizer):
    with pytest.raises(ConfigError, match=r"no 'chain_sums'; nearest: chain_sum"):
        opened(tokenizer, "chain_sums")
    with pytest.raises(ConfigError, match=r"refuses .*it takes .*max_digits"):
        opened(tokenizer, task_options={"digits": 3})
    with pytest.raises(ConfigError, match="refuses"):
        opened(tokenizer, task_options={"min_digits": 0})
    with pytest.raises(ConfigError, match=r"task_options\.seed"):
        opened(tokenizer, task_options={"seed": 3})


def test_tasks_that_prepare_their_whole_list_work_too(tokenizer):
    problems = opened(tokenizer, "gsm_symbolic", held_out=3, task_size=20)
    assert len({problems.train(i).record.text for i in range(20)}) > 10
