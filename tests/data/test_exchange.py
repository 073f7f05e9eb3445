"""Packing of tables for the wire: what goes in comes out, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.batch import PolicyRows, PromptBatch, Sequences
from rlhf.data.exchange import header_size, pack, payload_bytes, unpack
from rlhf.data.ragged import Ragged
from rlhf.errors import ShapeError


def rows_of(lengths: list[int]) -> PolicyRows:
    n = sum(lengths)
    size = torch.tensor(lengths, dtype=torch.int64)
    tokens = Ragged(torch.arange(n + len(lengths)), size + 1)
    return PolicyRows(
        Sequences(torch.arange(len(lengths)) * 7, tokens, size),
        Ragged(torch.randn(n), size),
        Ragged(torch.randn(n), size),
        Ragged(torch.rand(n) > 0.5, size),
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_table_survives_the_wire(lengths: list[int]) -> None:
    table = rows_of(lengths)
    header, payload = pack(table)
    assert header.numel() == header_size(PolicyRows, len(lengths))
    assert payload.numel() == payload_bytes(PolicyRows, len(lengths), header)
    back = unpack(PolicyRows, len(lengths), header, payload)
    assert torch.equal(back.sequences.tokens.values, table.sequences.tokens.values)
    assert torch.equal(back.sequences.sample_ids, table.sequences.sample_ids)
    assert torch.equal(back.old_logprobs.values, table.old_logprobs.values)
    assert torch.equal(back.loss_mask.values, table.loss_mask.values)
    assert torch.equal(back.loss_mask.lengths, table.loss_mask.lengths)


def test_a_column_of_another_dtype_is_refused() -> None:
    good = rows_of([2])
    bad = PolicyRows(good.sequences, good.old_logprobs, good.advantages, good.old_logprobs)
    with pytest.raises(ShapeError, match=r"declares torch\.bool"):
        pack(bad)


def test_a_table_with_python_objects_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"PromptBatch\.records"):
        header_size(PromptBatch, 1)
