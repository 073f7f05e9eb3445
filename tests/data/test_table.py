from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.data.ragged import Ragged
from rlhf.data.table import Table
from rlhf.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Inner(Table):
    ids: Tensor
    tokens: Ragged


@dataclass(frozen=True, slots=True)
class Outer(Table):
    inner: Inner
    names: tuple[str, ...]
    matrix: Tensor


def table(lengths):
    n = len(lengths)
    tokens = Ragged(torch.arange(sum(lengths)), torch.tensor(lengths, dtype=torch.int64))
    return Outer(Inner(torch.arange(n), tokens), tuple(f"row {i}" for i in range(n)), torch.arange(n * 3).view(n, 3))


def listed(of: Outer):
    rows = [row.tolist() for row in of.inner.tokens.rows()]
    return list(zip(of.inner.ids.tolist(), rows, of.names, of.matrix.tolist(), strict=True))


LENGTHS = st.lists(st.integers(0, 4), max_size=7)


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_select_takes_the_same_rows_of_every_field(lengths, data):
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=9) if lengths else st.just([]))
    whole = table(lengths)
    assert listed(whole.select(torch.tensor(index, dtype=torch.int64))) == [listed(whole)[i] for i in index]


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, cut=st.integers(0, 7))
def test_split_and_concat_are_inverse(lengths, cut):
    whole = table(lengths)
    cut = min(cut, len(lengths))
    parts = whole.split([cut, 0, len(lengths) - cut])
    assert [len(part) for part in parts] == [cut, 0, len(lengths) - cut]
    assert listed(Outer.concat(parts)) == listed(whole)
    assert type(parts[0]) is Outer
    assert parts[1].matrix.shape == (0, 3)


def test_split_sizes_must_add_up():
    with pytest.raises(ShapeError, match="do not add up to 3"):
        table([1, 2, 0]).split([1, 1])


def test_fields_with_different_rows_are_refused_by_name():
    with pytest.raises(ShapeError, match=r"Inner: ids has 3 rows, tokens has 1"):
        Inner(torch.arange(3), Ragged(torch.arange(2), torch.tensor([2])))


def test_to_moves_nested_tensors_and_leaves_tuples():
    moved = table([2, 1]).to(torch.device("meta"))
    assert moved.inner.tokens.values.device.type == "meta"
    assert moved.matrix.device.type == "meta"
    assert moved.names == ("row 0", "row 1")


def test_concat_of_nothing_is_refused():
    with pytest.raises(ShapeError, match="at least one"):
        Outer.concat([])
