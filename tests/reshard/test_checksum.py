"""Checksums add up whatever the cut, and see every change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.reshard import checksum as module
from rlhf.reshard.checksum import checksum
from rlhf.reshard.layout import Box


def whole_of(tensor: torch.Tensor) -> Box:
    return Box(tuple((0, extent) for extent in tensor.shape))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    data=st.data(),
)
def test_blocks_add_up_to_the_whole(shape, dtype, data):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    total = torch.zeros((), dtype=torch.int64)
    for span in ((0, cut), (cut, shape[dim])):
        box = Box((*whole_of(tensor).spans[:dim], span, *whole_of(tensor).spans[dim + 1 :]))
        if box.num_elements:
            total += checksum("w", box, tensor[box.slices])
    assert total % module.MODULUS == checksum("w", whole_of(tensor), tensor)


def test_a_large_block_is_read_in_parts(monkeypatch):
    tensor = torch.randn(37, 11)
    at_once = checksum("w", whole_of(tensor), tensor)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 50)
    assert checksum("w", whole_of(tensor), tensor) == at_once


def test_every_flipped_bit_every_swap_and_every_other_name_shows():
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    seen = {int(checksum("w", whole_of(tensor), tensor)), int(checksum("v", whole_of(tensor), tensor))}
    seen.add(int(checksum("w", Box.of((6, 12), (0, 5)), tensor)))
    count = len(seen)
    assert count == 3
    for at in range(30):
        for bit in range(32):
            changed = tensor.clone()
            changed.view(torch.int32).view(-1)[at] ^= 1 << bit if bit < 31 else -(2**31)
            seen.add(int(checksum("w", whole_of(tensor), changed)))
            count += 1
        for other in range(at):
            swapped = tensor.clone().view(-1)
            swapped[[at, other]] = swapped[[other, at]]
            seen.add(int(checksum("w", whole_of(tensor), swapped.view(6, 5))))
            count += 1
    assert len(seen) == count


def test_signs_and_scales_of_whole_tensors_show():
    """Changes of upper bits alone, all over a tensor, must not cancel modulo 2^32."""
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    seen = {int(checksum("w", whole_of(tensor), tensor * scale)) for scale in (1, -1, 2, 4, 0.5, 2.0**16)}
    for rows in range(2, 64, 2):
        negated = tensor.clone()
        negated[:rows] *= -1
        seen.add(int(checksum("w", whole_of(tensor), negated)))
    assert len(seen) == 6 + 31


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inverted_bits_show(dtype):
    """Zeros against memory full of ones (NaN) is the case that occurs."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    tensor = torch.zeros(4, 6, dtype=dtype)
    seen = {int(checksum("w", whole_of(tensor), tensor))}
    for count in range(1, 25):
        changed = tensor.clone()
        changed.view(bits).view(-1)[:count] = -1
        seen.add(int(checksum("w", whole_of(tensor), changed)))
    assert len(seen) == 25


def test_not_a_number_and_minus_zero_are_bits_like_others():
    tensor = torch.tensor([0.0, float("nan")])
    assert checksum("w", Box.of((0, 2)), tensor) == checksum("w", Box.of((0, 2)), tensor.clone())
    assert checksum("w", Box.of((0, 2)), tensor) != checksum("w", Box.of((0, 2)), torch.tensor([-0.0, float("nan")]))


def test_a_block_of_another_shape_is_our_own_fault():
    with pytest.raises(AssertionError, match="block"):
        checksum("w", Box.of((0, 2)), torch.zeros(3))
