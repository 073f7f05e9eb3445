import pytest

from rlhf.config.data import RewardConfig
from rlhf.data.prompts import open_problems
from rlhf.reward import exact_match, gym
from rlhf.reward.function import RewardFunction
from tests.data.sources import byte_tokenizer, gym_config


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("plain"))
    options = {"min_terms": 2, "max_terms": 3, "min_digits": 2}
    return open_problems(gym_config("chain_sum", held_out=3, task_options=options), tokenizer, seed=1).train(0).record


def test_only_the_right_answer_scores_one(record):
    right, wrong = record.answer, str(int(record.answer) + 1)
    assert gym.score(record, f" {right}\n") == 1.0
    assert gym.score(record, wrong) < 0.5
    assert gym.score(record, f"I think that it is {right}") < 1.0
    assert gym.score_last_number(record, f"I think that it is {right}.") == 1.0
    assert gym.score_last_number(record, "no idea") < 0.5
    assert gym.score_tagged(record, f"Hm. Answer: {right}") == 1.0
    assert gym.score_tagged(record, f"Answer: {wrong}, not {right}") < 0.5


def test_solved_gives_no_partial_credit(record):
    assert gym.solved(record, record.answer) == 1.0
    assert 0.0 < gym.score(record, f"{record.answer} {record.answer}") < 1.0
    assert gym.solved(record, f"{record.answer} {record.answer}") == 0.0


def test_solved_last_number_gives_all_or_nothing_whatever_stands_around_it(record):
    right = record.answer
    assert gym.solved_last_number(record, f"1 + 1? No: {right}.") == 1.0
    assert 0.0 < gym.score_last_number(record, f"{right}0") < 1.0
    assert gym.solved_last_number(record, f"{right}0") == 0.0
    assert gym.solved_last_number(record, f"{right}, or 7") == 0.0


def test_it_runs_in_the_reward_processes(record):
    with RewardFunction(RewardConfig(timeout_s=30.0)) as function:
        results = function.score([record] * 2, [record.answer, "x"])
    assert results[0].score == 1.0
    assert results[1].score < 0.5
    assert not results[1].error


def test_a_scorer_that_depends_on_the_options_gets_them(record):
    scorer = gym._scorer("chain_sum", '{"min_digits": 2, "max_digits": 3}')
    assert scorer.config.max_digits == 3


def test_exact_match(record):
    record = type(record)("q", "Six times seven.\n#### 42", {})
    assert exact_match.score(record, record.answer + " ") == 1.0
    assert exact_match.score(record, "42") == 0.0
    assert exact_match.score_last_number(record, "It is 42.0") == 1.0
    assert exact_match.score_last_number(record, "41") == 0.0
    assert exact_match.score_last_number(record, "") == 0.0
    assert exact_match.score_tagged(record, "so\n#### 42") == 1.0
    assert exact_match.score_tagged(record, "42") == 0.0
