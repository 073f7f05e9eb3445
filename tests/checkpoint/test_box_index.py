"""Boxes that overlap, against looking at all of them; covers, against counting elements."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.checkpoint.store.box_index import BoxIndex, spans_of
from rlhf.checkpoint.store.coverage import check_cover
from rlhf.checkpoint.store.file_plan import contiguous_parts
from rlhf.errors import CheckpointError
from rlhf.reshard.layout import Box

SHAPE = (4, 3, 5)


@st.composite
def boxes(draw):
    spans = []
    for extent in SHAPE:
        start = draw(st.integers(0, extent - 1))
        spans.append((start, draw(st.integers(start + 1, extent))))
    return Box(tuple(spans))


@settings(max_examples=150, deadline=None)
@given(st.lists(boxes(), min_size=1, max_size=12), boxes())
def test_overlaps_are_those_of_all_pairs(held, asked):
    pairs = [(at, common) for at, box in enumerate(held) if (common := box.intersect(asked)) is not None]
    assert BoxIndex(spans_of(held)).overlapping(asked) == pairs


@settings(max_examples=150, deadline=None)
@given(st.lists(boxes(), max_size=6), st.integers(1, 70))
def test_a_cover_is_one_when_each_element_is_counted_once(taken, most):
    """Boxes at random, and the rest of the tensor cut into parts around them; then one element too many or too few."""
    whole = Box(tuple((0, extent) for extent in SHAPE))
    left = [whole]
    disjoint = []
    for box in taken:
        disjoint += [common for one in left if (common := one.intersect(box)) is not None]
        left = [rest for one in left for rest in one.minus(box)]
    cover = [part for one in disjoint + left for part in contiguous_parts(one, most)]
    counted = np.zeros(SHAPE, int)
    for box in cover:
        counted[box.slices] += 1
    assert (counted == 1).all()
    check_cover("here", "x", SHAPE, cover)
    for wrong in (
        [*cover, cover[0]],
        [*cover[1:], cover[-1]],
        [*cover[1:], Box(((0, 1),) * 3)],
        [Box(((0, 5), (0, 1), (0, 1)))],
    ):
        again = np.zeros((5, 3, 5), int)
        for box in wrong:
            again[box.slices] += 1
        if (again[:4] == 1).all() and not again[4:].any():
            continue  # what was left out is what was put in
        with pytest.raises(CheckpointError, match=r"^here: "):
            check_cover("here", "x", SHAPE, wrong)


@settings(max_examples=100, deadline=None)
@given(boxes(), st.integers(1, 70))
def test_parts_of_a_box_follow_one_another_in_memory(box, most):
    numbers = np.arange(4 * 3 * 5).reshape(SHAPE)
    parts = contiguous_parts(box, most)
    assert all(0 < part.num_elements <= most for part in parts)
    listed = [number for part in parts for number in numbers[part.slices].ravel()]
    assert listed == list(numbers[box.slices].ravel())
    compact = {at: place for place, at in enumerate(product(*(range(*span) for span in box.spans)))}
    for part in parts:
        places = [compact[at] for at in product(*(range(*span) for span in part.spans))]
        assert places == list(range(places[0], places[0] + len(places)))
