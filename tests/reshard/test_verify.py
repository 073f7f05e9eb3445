"""Flipped bits are named with tensor, rank and place, and what follows is what the policy says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.reshard.layout import Box
from rlhf.reshard.verify import around, grid
from tests.harness.ranks import run_ranks
from tests.reshard.flips import four_ranks
from tests.reshard.gloo import as_table
from tests.reshard.toy import Toy, engine, source

TOY = Toy(vocab=29, hidden=6, heads=8, kv_heads=4, head_dim=2, ffn=24, layers=2)


@pytest.mark.dist
def test_a_hundred_of_a_hundred_flipped_bits_are_named_within_20_syncs_and_policies_hold():
    src, dst = as_table(source(TOY, tp=4, stages=(2,), dp=1)), as_table(engine(TOY, tp=2, dp=2, twice=True))
    pipelined = as_table(source(TOY, tp=2, stages=(1, 1), dp=1))
    half = tuple(replace(layout, dtype="bfloat16") for layout in (pipelined, dst))
    run_ranks(4, four_ranks, {"fp32": (src, dst), "bf16": half})


@settings(max_examples=50, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=3), most=st.integers(1, 300)
)
def test_a_grid_is_a_partition(spans, most):
    box = Box(tuple((start, start + extent) for start, extent in spans))
    blocks = list(grid(box, most))
    assert 1 <= len(blocks) <= most
    seen = torch.zeros([stop for _, stop in box.spans], dtype=torch.int)
    for block in blocks:
        assert block.num_elements
        seen[block.slices] += 1
    assert (seen[box.slices] == 1).all()
    assert seen.sum() == box.num_elements
    assert around(blocks) == box


def test_one_element_of_a_billion_is_found_in_five_rounds():
    box, at = Box.of((0, 2**15), (0, 2**15)), Box.of((12345, 12346), (777, 778))
    rounds = 0
    while box != at:
        box = next(block for block in grid(box, 256) if block.contains(at))
        rounds += 1
    assert rounds == 4
