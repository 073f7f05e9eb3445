import pytest
import torch

from rlhf.data.batch import PromptBatch, Sequences
from rlhf.data.prompts import FIRST_HELD_OUT_ID, AnswerSource, PromptSource, open_problems
from tests.data.sources import byte_tokenizer, file_config, gym_config, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("plain"))


def source(tokenizer, prompts=7, samples=3, **options):
    problems = open_problems(gym_config("products", held_out=5, **options), tokenizer, seed=1)
    return PromptSource(problems, prompts_per_step=prompts, samples_per_prompt=samples)


def test_ids_follow_the_rule(tokenizer):
    batch = source(tokenizer).rows_of(14, 1, 3)
    # Prompts 1 and 4 of the step from prompt 14 on: ids 14 + p, three samples each.
    assert batch.prompt_ids.tolist() == [15, 15, 15, 18, 18, 18]
    assert batch.sample_ids.tolist() == [45, 46, 47, 54, 55, 56]


@pytest.mark.parametrize("num_owners", [1, 2, 3, 7, 9])
def test_owners_together_hold_the_step_whatever_their_number(tokenizer, num_owners):
    prompts = source(tokenizer)
    whole = prompts.rows_of(28, 0, 1)
    parts = PromptBatch.concat([prompts.rows_of(28, owner, num_owners) for owner in range(num_owners)])
    assert len(whole) == len(parts) == 21
    order = parts.sample_ids.argsort()
    sorted_parts = parts.select(order)
    assert torch.equal(sorted_parts.sample_ids, whole.sample_ids)
    assert torch.equal(sorted_parts.tokens.values, whole.tokens.values)
    assert sorted_parts.records == whole.records


def test_a_step_is_the_same_asked_first_or_late(tokenizer):
    one, two = source(tokenizer), source(tokenizer)
    for step in range(5):
        one.rows_of(7 * step, 0, 2)
    assert torch.equal(one.rows_of(63, 0, 2).tokens.values, two.rows_of(63, 0, 2).tokens.values)


def test_tokens_are_those_of_the_text(tokenizer):
    batch = source(tokenizer).rows_of(0, 0, 1)
    for row, record in zip(batch.tokens.rows(), batch.records, strict=True):
        assert tokenizer.decode(row.tolist(), clean_up_tokenization_spaces=False) == record.text


def test_held_out_is_split_over_owners_with_ids_of_its_own(tokenizer):
    prompts = source(tokenizer)
    batches = [prompts.held_out(owner, 3) for owner in range(3)]
    assert [len(batch) for batch in batches] == [2, 2, 1]
    ids = sorted(i for batch in batches for i in batch.sample_ids.tolist())
    assert ids == [FIRST_HELD_OUT_ID + i for i in range(5)]
    assert len({record.text for batch in batches for record in batch.records}) == 5


def test_several_samples_of_a_held_out_prompt_stand_together(tokenizer):
    prompts = source(tokenizer)
    one, three = prompts.held_out(1, 2), prompts.held_out(1, 2, samples=3)
    assert three.prompt_ids.tolist() == one.prompt_ids.repeat_interleave(3).tolist()
    assert len(set(three.sample_ids.tolist())) == 6
    assert min(three.sample_ids.tolist()) >= FIRST_HELD_OUT_ID
    assert three.records == tuple(record for record in one.records for _ in range(3))


def test_an_owner_without_prompts_has_an_empty_batch(tokenizer):
    batch = source(tokenizer, prompts=2).rows_of(0, 2, 3)
    assert len(batch) == 0
    assert batch.tokens.values.dtype == torch.int64


def test_answers_follow_their_prompts_and_end(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}:", "answer": "a" * i} for i in range(1, 6)])
    problems = open_problems(file_config(path, held_out=1), tokenizer, seed=1, need_answers=True)
    answers = AnswerSource(problems, tokenizer, batch_samples=4, eos_token_id=tokenizer.eos_token_id)
    parts = [answers.rows_of(3, owner, 3) for owner in range(3)]
    assert [part.sample_ids.tolist() for part in parts] == [[12, 15], [13], [14]]
    batch = Sequences.concat(parts)
    for row, length in zip(batch.tokens.rows(), batch.response_lengths.tolist(), strict=True):
        text = tokenizer.decode(row.tolist())
        number = int(text[1])
        assert text == f"q{number}:" + "a" * number + tokenizer.eos_token
        assert length == number + 1
    assert len(answers.held_out(0, 1)) == 1
    assert len(answers.held_out(1, 2)) == 0
    assert answers.report().usable == 4
