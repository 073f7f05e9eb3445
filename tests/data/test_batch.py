import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.batch import (
    Experience,
    FinishReason,
    PromptBatch,
    PromptRecord,
    RewardResult,
    Rollout,
    ScoredRollout,
    Sequences,
    ShapedRollout,
)
from rlhf.data.ragged import Ragged

ROWS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=6)


def experience(rows: list[tuple[int, int]]) -> Experience:
    """Rows of (prompt tokens, response tokens); each value says which row and token it is."""
    n = len(rows)
    prompt_lengths, lengths = (torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in (0, 1))
    marks = torch.cat([torch.zeros(0), *(100.0 * i + torch.arange(row[1]) for i, row in enumerate(rows))])

    def tokens(dtype: torch.dtype) -> Ragged:
        return Ragged(marks.to(dtype), lengths)

    prompts = PromptBatch(
        sample_ids=torch.arange(n),
        prompt_ids=torch.arange(n) // 2,
        tokens=Ragged(torch.arange(int(prompt_lengths.sum())), prompt_lengths),
        records=tuple(PromptRecord(f"prompt {i}", str(i), {"row": i}) for i in range(n)),
    )
    rollout = Rollout(
        prompts=prompts,
        responses=tokens(torch.int64),
        rollout_logprobs=tokens(torch.float32),
        finish_reasons=torch.full((n,), FinishReason.STOP, dtype=torch.int8),
        provenance=tokens(torch.uint8),
        policy_versions=tokens(torch.int32),
    )
    scored = ScoredRollout(
        rollout=rollout,
        scores=torch.arange(n).float(),
        valid=torch.arange(n) % 2 == 0,
        results=tuple(RewardResult(float(i)) for i in range(n)),
    )
    names = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
    return Experience(
        shaped=ShapedRollout(scored, scored.scores, scored.scores, scored.valid),
        **{name: tokens(torch.float32) for name in names},
        loss_mask=tokens(torch.int64).like(marks > 0),
    )


def rows_of(batch: Experience) -> list[tuple]:
    """Everything a row holds, row by row."""
    rollout = batch.scored.rollout
    ragged = (rollout.prompts.tokens, rollout.responses, rollout.policy_versions, batch.advantages, batch.loss_mask)
    columns = [[row.tolist() for row in column.rows()] for column in ragged]
    tensors = (rollout.prompts.sample_ids, batch.scored.scores, batch.scored.valid)
    columns += [tensor.tolist() for tensor in tensors] + [rollout.prompts.records, batch.scored.results]
    return list(zip(*columns, strict=True))


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, data=st.data())
def test_an_experience_is_selected_split_and_joined_row_by_row(rows, data):
    whole = experience(rows)
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))), dtype=torch.int64)
    shuffled = whole.select(order)
    assert rows_of(shuffled) == [rows_of(whole)[i] for i in order.tolist()]
    cut = data.draw(st.integers(0, len(rows)))
    assert rows_of(Experience.concat(shuffled.split([cut, len(rows) - cut]))) == rows_of(shuffled)


def test_dtypes_survive_selection_of_nothing():
    nothing = experience([(2, 3), (1, 0)]).select(torch.zeros(0, dtype=torch.int64))
    assert len(nothing) == 0
    assert nothing.scored.rollout.responses.values.dtype == torch.int64
    assert nothing.scored.rollout.provenance.values.dtype == torch.uint8
    assert nothing.loss_mask.values.dtype == torch.bool
    assert nothing.scored.rollout.finish_reasons.dtype == torch.int8


def test_empty_joins_with_rows():
    whole = experience([(2, 3), (1, 1)])
    assert rows_of(Experience.concat([Experience.empty(), whole, Experience.empty()])) == rows_of(whole)
    assert len(Sequences.empty()) == 0
