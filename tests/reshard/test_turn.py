"""The slices of a turn are a partition of every tensor, the same whoever asks, and of about the same size."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.reshard import turn as module
from rlhf.reshard.layout import Box
from rlhf.reshard.turn import EVERYTHING, SLICES, Turn


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    band=st.integers(1, 30),
    low=st.integers(0, 39),
    high=st.integers(1, 40),
    name=st.text(max_size=5),
)
def test_every_element_of_a_box_is_in_one_slice_whatever_the_box(shape, band, low, high, name):
    shape, low = tuple(shape), min(low, shape[0] - 1)
    box = Box(((low, max(low + 1, min(high, shape[0]))), *((0, extent) for extent in shape[1:])))
    before, module.BAND_ELEMENTS = module.BAND_ELEMENTS, band
    try:
        of_box, of_whole = torch.full(shape, -1), torch.full(shape, -1)
        for number in range(SLICES):
            for part in Turn(number).parts(name, shape, box):
                assert (of_box[part.slices] == -1).all()
                of_box[part.slices] = number
            for part in Turn(number).parts(name, shape, Box(tuple((0, extent) for extent in shape))):
                of_whole[part.slices] = number
        assert (of_whole >= 0).all()
        assert torch.equal(of_box[box.slices], of_whole[box.slices])
        assert (of_box >= 0).sum() == box.num_elements
    finally:
        module.BAND_ELEMENTS = before


def test_everything_is_one_slice():
    box = Box.of((3, 5), (0, 9))
    assert list(EVERYTHING.parts("w", (10, 9), box)) == [box]


def test_slices_of_a_large_tensor_are_equal_for_each_of_eight_ranks():
    shape = (64000, 1024)
    for rank in range(8):
        box = Box.of((rank * 8000, rank * 8000 + 8000), (0, 1024))
        sizes = [sum(part.num_elements for part in Turn(n).parts("w", shape, box)) for n in range(SLICES)]
        assert sum(sizes) == box.num_elements
        assert max(sizes) <= 1.01 * box.num_elements / SLICES


def test_small_tensors_take_different_turns():
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(400)]
    counts = [sum(1 for name in names for _ in Turn(n).parts(name, (64,), Box.of((0, 64)))) for n in range(SLICES)]
    assert sum(counts) == 400
    assert max(counts) < 45  # 20 on average; 5.6 standard deviations of a fair deal


def test_bands_are_large_enough_to_be_worth_a_call():
    for shape in ((151936, 4096), (4096, 11008), (100, 100), (7,)):
        rows = module.band_rows(shape)
        assert prod(shape) < module.BAND_ELEMENTS or rows * prod(shape[1:]) >= module.BAND_ELEMENTS
