"""Packed microbatches against a loop over rows."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.batch import Sequences
from rlhf.data.ragged import Ragged
from rlhf.errors import ShapeError
from rlhf.mcore.packing import check_sequences, pack

CPU = torch.device("cpu")


def _sequences(rows):
    """rows: (tokens, response length)."""
    return Sequences(
        sample_ids=torch.arange(10, 10 + len(rows)),
        tokens=Ragged.of([torch.tensor(tokens) for tokens, _ in rows], dtype=torch.int64),
        response_lengths=torch.tensor([length for _, length in rows], dtype=torch.int64),
    )


@st.composite
def _rows(draw):
    tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=9))
    return tokens, draw(st.integers(0, len(tokens) - 1))


@settings(deadline=None)
@given(st.lists(_rows(), max_size=6), st.sampled_from([1, 2, 4]))
def test_predictions_stand_one_before_their_targets(rows, multiple_of):
    packed = pack(_sequences(rows), multiple_of=multiple_of, device=CPU)
    flat = [token for tokens, _ in rows for token in tokens]
    want_index, want_targets, want_positions, start = [], [], [], 0
    for tokens, response in rows:
        for at in range(len(tokens) - response, len(tokens)):
            want_index.append(start + at - 1)
            want_targets.append(tokens[at])
        want_positions += range(len(tokens))
        start += len(tokens)
    num = packed.tokens.numel()
    assert packed.predict_index.tolist() == want_index
    assert packed.targets.tolist() == want_targets
    assert packed.tokens[0].tolist() == flat + [0] * (num - len(flat))
    assert packed.positions[0, : len(flat)].tolist() == want_positions
    assert num % multiple_of == 0
    assert max(len(flat), 1) <= num < len(flat) + multiple_of + (not flat)
    cu_seqlens = packed.params.cu_seqlens_q.tolist()
    assert cu_seqlens[: len(rows) + 1] == [0, *torch.tensor([len(t) for t, _ in rows]).cumsum(0).tolist()]
    assert cu_seqlens[-1] == num
    assert packed.params.max_seqlen_q == max(b - a for a, b in pairwise(cu_seqlens))


def test_bad_rows_are_named():
    with pytest.raises(ShapeError, match=r"row 1 \(sample 11\) has 2 tokens, 2 of them response"):
        check_sequences(_sequences([([1, 2], 1), ([3, 4], 2)]), vocab_size=9)
    with pytest.raises(ShapeError, match=r"token ids 1\.\.9; the model has 0\.\.8"):
        check_sequences(_sequences([([1, 9], 1)]), vocab_size=9)
    three = _sequences([([1, 2], 1), ([3, 4, 5], 2)])
    with pytest.raises(ShapeError, match=r"row 1 \(sample 11\) has 3 tokens; .* sliding_window = 2"):
        check_sequences(three, vocab_size=9, sliding_window=2)
    check_sequences(three, vocab_size=9, sliding_window=3)
    check_sequences(_sequences([]), vocab_size=9, sliding_window=3)
