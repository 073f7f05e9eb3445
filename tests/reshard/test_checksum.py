"""Checksums equal a slow reference, add up whatever the cut, and see every change."""

import hashlib
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.reshard import checksum as module
from rlhf.reshard.checksum import checksum, checksums, sums_in, twice, wrapped
from rlhf.reshard.layout import Box

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMS = pytest.mark.parametrize("brief", [False, True])
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def whole_of(tensor: torch.Tensor) -> Box:
    return Box(tuple((0, extent) for extent in tensor.shape))


def signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def hashed(role: int, index: int) -> int:
    """SplitMix64 with arithmetic shifts, in Python's own integers."""
    z = signed(index + 0x1E3779B97F4A7C15 * (role + 1))
    z = signed((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9)
    z = signed((z ^ (z >> 27)) * 0x94D049BB133111EB)
    return z ^ (z >> 31)


def slow_weights(row: int, place: int) -> tuple[int, int]:
    """Of a number of 8 bytes, and of its upper half."""
    return (hashed(0, row) | 1) + 2 * hashed(2, place), (hashed(1, row) | 1) + 2 * hashed(3, place)


def weights_of(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`slow_weights` of all places, from the tables that the module keeps."""
    cpu, (rows, places) = torch.device("cpu"), shape
    (a, c), (b, d) = module._hashes(0, 0, rows, cpu), module._hashes(1, 0, places, cpu)
    return a[:, None] + b, c[:, None] + d


def slow_checksum(name: str, box: Box, block: torch.Tensor, *, brief: bool = False) -> int:
    """The definition, element by element, with Python's own integers."""
    total, size = 0, block.dtype.itemsize
    for at in product(*(range(start, stop) for start, stop in box.spans)):
        element = block[tuple(i - start for i, (start, _) in zip(at, box.spans, strict=True))]
        raw = bytes(element.reshape(1).view(torch.uint8).tolist())
        *earlier, row, last = (0, *at) if len(at) == 1 else at
        place, skipped = divmod(last * size, 8)
        z = int.from_bytes((bytes(skipped) + raw).ljust(8, b"\0"), "little", signed=True)
        of_number, of_upper = slow_weights(row, place)
        factor = 1
        for dim, index in enumerate(earlier):
            factor *= hashed(4 + 2 * dim, index) | 1
        total += factor * (of_number * z + (0 if brief else of_upper * (z >> 32)))
    name_number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
    return signed(total * name_number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spans", [((3, 8),), ((0, 4), (5, 12)), ((1, 3), (2, 5), (7, 11)), ((0, 2), (1, 3), (2, 4), (0, 3))]
)
@FORMS
def test_equals_the_definition(dtype, spans, brief):
    box = Box(spans)
    block = torch.randn(box.shape, generator=torch.Generator().manual_seed(len(spans))).to(dtype)
    right = slow_checksum("layer.w", box, block, brief=brief)
    assert checksum("layer.w", box, block, brief=brief) == right
    assert checksum("layer.w", box, block.transpose(0, -1).contiguous().transpose(0, -1), brief=brief) == right


def test_many_blocks_at_a_time_are_summed_each_by_itself():
    blocks = [
        (name, Box.of((row, row + rows), (2, 2 + columns)), torch.randn(rows, columns))
        for row, (name, rows, columns) in enumerate(product("vw", (1, 4, 9), (1, 3, 8)))
    ]
    for brief in (False, True):
        assert checksums(blocks, brief=brief) == [slow_checksum(*block, brief=brief) for block in blocks]


@st.composite
def cuts(draw: st.DrawFn, box: Box, depth: int = 4) -> list[Box]:
    """Any guillotine cut of a box."""
    dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if not depth or not dims or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    start, stop = box.spans[dim]
    at = draw(st.integers(start + 1, stop - 1))
    left = Box((*box.spans[:dim], (start, at), *box.spans[dim + 1 :]))
    right = Box((*box.spans[:dim], (at, stop), *box.spans[dim + 1 :]))
    return draw(cuts(left, depth - 1)) + draw(cuts(right, depth - 1))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 2**20),
    data=st.data(),
)
def test_blocks_add_up_to_the_whole_whatever_the_cut(shape, dtype, offset, data):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    whole = whole_of(tensor).shift((offset,) * len(shape))
    parts, brief = data.draw(cuts(whole)), data.draw(st.booleans())
    blocks = [("w", part, tensor[module.inside(whole, part).slices]) for part in parts]
    assert wrapped(sum(checksums(blocks, brief=brief))) == checksum("w", whole, tensor, brief=brief)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sums_in_places_do_not_depend_on_how_the_holdings_are_cut(data):
    tensor = torch.randn(11, 7, generator=torch.Generator().manual_seed(3))
    whole = whole_of(tensor)
    held = [(1, part, tensor[part.slices]) for part in data.draw(cuts(whole))]
    again = Box.of((2, 5), (0, 7))
    held += [(1, again, tensor[again.slices]), *twice(again, tensor[again.slices], tensor[again.slices])]
    places = [("w", place) for place in data.draw(cuts(whole))]
    found = sums_in(places, lambda _: held)
    assert found == [int(checksum(name, place, tensor[place.slices])) for name, place in places]
    assert sums_in([("w", Box.of((20, 30), (0, 7)))], lambda _: held) == [0]


def test_one_wrong_copy_of_two_shows_and_two_alike_do():
    tensor, box = torch.arange(6.0).view(2, 3), Box.of((0, 2), (0, 3))
    wrong = tensor + 1

    def total(first: torch.Tensor, second: torch.Tensor) -> int:
        blocks = [(1, box, first), (1, box, second), *twice(box, first, second)]
        return sums_in([("w", box)], lambda _: blocks)[0]

    right = int(checksum("w", box, tensor))
    assert total(tensor, tensor) == right
    assert right not in (total(wrong, tensor), total(tensor, wrong), total(wrong, wrong))


def test_a_large_block_is_read_in_parts(monkeypatch):
    tensor = torch.randn(37, 11)
    at_once = checksum("w", whole_of(tensor), tensor)
    for numbers in (1, 5, 50):
        monkeypatch.setattr(module, "TILE_NUMBERS", {"cpu": numbers})
        assert checksum("w", whole_of(tensor), tensor) == at_once


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_is_not_aligned_gives_the_same(dtype):
    flat = torch.randn(200, generator=torch.Generator().manual_seed(4)).to(dtype)
    aligned = flat[:72].view(6, 12).clone()
    for stride, offset in ((13, 0), (13, 3), (12, 1), (16, 5)):
        strided = flat.as_strided((6, 12), (stride, 1), offset)
        strided.copy_(aligned)
        assert checksum("w", whole_of(aligned), strided) == checksum("w", whole_of(aligned), aligned)


def changes_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Each with one bit flipped, or two elements swapped."""
    bits, top = BITS[tensor.dtype.itemsize], 8 * tensor.dtype.itemsize - 1
    for at in range(tensor.numel()):
        for bit in range(top + 1):
            changed = tensor.clone()
            changed.view(bits).view(-1)[at] ^= 1 << bit if bit < top else -(1 << top)
            yield changed
        for other in range(at):
            changed = tensor.clone()
            changed.view(-1)[[at, other]] = tensor.view(-1)[[other, at]]
            yield changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_flipped_bit_every_swap_and_every_other_name_shows(dtype):
    tensor = (torch.arange(30).view(6, 5) * 1.5 - 20).to(dtype)  # all different, also as bf16
    sums = [checksum("w", whole_of(tensor), tensor), checksum("v", whole_of(tensor), tensor)]
    sums.append(checksum("w", Box.of((6, 12), (0, 5)), tensor))
    sums += (checksum("w", whole_of(tensor), changed) for changed in changes_of(tensor))
    assert len(set(sums)) == len(sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_flipped_bit_and_every_swap_shows_in_the_short_form(dtype):
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(6)).to(dtype)
    right, *others = (checksum("w", whole_of(tensor), one, brief=True) for one in (tensor, *changes_of(tensor)))
    assert right not in others  # which may equal one another: 2^63 times any odd number is 2^63


@pytest.mark.parametrize("shape", [(1, 2**18), (2**9, 2**9)])
def test_changes_of_one_bit_at_two_places_do_not_cancel(shape):
    """All pairs of 2^18 places, 2^36 of them with signs: the weights differ modulo 2^49, what bit 15 leaves of 64.

    For random weights the chance that any two of them do not is 2^-12.
    """
    lower, upper = weights_of(shape)
    assert (int(lower[0, 77]), int(upper[0, 77])) == tuple(signed(weight) for weight in slow_weights(0, 77))
    for weights in (lower, upper):
        assert (weights % 2 == 1).all()
        both = torch.cat([weights.flatten(), -weights.flatten()]) & (2**49 - 1)
        assert both.unique().numel() == both.numel()


def test_two_signs_in_upper_halves_show_in_the_full_form_alone():
    tensor, changed = torch.ones(4, 6), torch.ones(4, 6)
    changed[1, 1] = changed[2, 5] = -1.0
    first, second = (checksum("w", whole_of(tensor), one) for one in (tensor, changed))
    assert first != second
    first, second = (checksum("w", whole_of(tensor), one, brief=True) for one in (tensor, changed))
    assert first == second


@FORMS
def test_signs_and_scales_of_whole_tensors_show(brief):
    """Changes of upper bits alone, all over a tensor, must not cancel."""
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    seen = {int(checksum("w", whole_of(tensor), tensor * scale, brief=brief)) for scale in (1, -1, 2, 4, 0.5, 2.0**16)}
    for rows in range(2, 64, 2):
        negated = tensor.clone()
        negated[:rows] *= -1
        seen.add(int(checksum("w", whole_of(tensor), negated, brief=brief)))
    assert len(seen) == 6 + 31


@pytest.mark.parametrize("dtype", DTYPES)
def test_inverted_bits_show(dtype):
    """Zeros against memory full of ones (NaN) is the case that occurs."""
    tensor = torch.zeros(4, 6, dtype=dtype)
    seen = {int(checksum("w", whole_of(tensor), tensor))}
    for count in range(1, 25):
        changed = tensor.clone()
        changed.view(BITS[dtype.itemsize]).view(-1)[:count] = -1
        seen.add(int(checksum("w", whole_of(tensor), changed)))
    assert len(seen) == 25


def test_not_a_number_and_minus_zero_are_bits_like_others():
    tensor = torch.tensor([0.0, float("nan")])
    assert checksum("w", Box.of((0, 2)), tensor) == checksum("w", Box.of((0, 2)), tensor.clone())
    assert checksum("w", Box.of((0, 2)), tensor) != checksum("w", Box.of((0, 2)), torch.tensor([-0.0, float("nan")]))


def test_a_block_of_another_shape_is_our_own_fault():
    with pytest.raises(AssertionError, match="block"):
        checksum("w", Box.of((0, 2)), torch.zeros(3))
