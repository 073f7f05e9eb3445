import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.ragged import Ragged
from rlhf.errors import ShapeError

ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=6), max_size=8)


def ragged(rows, dtype=torch.int64):
    return Ragged.of([torch.tensor(row, dtype=dtype) for row in rows], dtype=dtype)


def listed(of: Ragged):
    return [row.tolist() for row in of.rows()]


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, data=st.data())
def test_select_gives_the_rows_asked_for(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12) if rows else st.just([]))
    picked = ragged(rows).select(torch.tensor(index, dtype=torch.int64))
    assert listed(picked) == [rows[i] for i in index]
    assert picked.values.dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(ROWS, min_size=1, max_size=4))
def test_concat_and_select_are_inverse(parts):
    whole = Ragged.concat([ragged(part) for part in parts])
    assert listed(whole) == [row for part in parts for row in part]
    at = 0
    for part in parts:
        assert listed(whole.select(torch.arange(at, at + len(part)))) == part
        at += len(part)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_row_ids_and_cu_seqlens_agree_with_the_rows(rows):
    of = ragged(rows)
    assert of.row_ids().tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert of.cu_seqlens.tolist() == [sum(len(row) for row in rows[:i]) for i in range(len(rows) + 1)]
    assert len(of) == len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool, torch.int32])
def test_no_rows_keep_their_dtype(dtype):
    empty = Ragged.of([], dtype=dtype)
    for of in (empty, empty.select(torch.zeros(0, dtype=torch.int64)), Ragged.concat([empty, empty])):
        assert len(of) == 0
        assert of.values.dtype == dtype
        assert of.rows() == ()


def test_large_integers_survive_of():
    assert ragged([[2**53 + 1], []]).values.tolist() == [2**53 + 1]


def test_select_carries_the_gradient():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    Ragged(values, torch.tensor([1, 2])).select(torch.tensor([1, 1])).values.sum().backward()
    assert values.grad.tolist() == [0.0, 2.0, 2.0]


def test_values_move_to_a_device_and_lengths_stay():
    moved = ragged([[1], [2, 3]]).to(torch.device("meta"))
    assert moved.values.device.type == "meta"
    assert moved.lengths.device.type == "cpu"


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="sum to 4, but there are 3"):
        Ragged(torch.zeros(3), torch.tensor([1, 3]))
    with pytest.raises(ShapeError, match="int64"):
        Ragged(torch.zeros(3), torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ShapeError, match="negative"):
        Ragged(torch.zeros(3), torch.tensor([4, -1]))
    with pytest.raises(ShapeError, match="2 rows"):
        ragged([[1], [2]]).select(torch.tensor([2]))
