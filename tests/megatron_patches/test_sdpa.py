"""Packed attention against a plain float64 loop over sequences and heads. T tokens, H query and G KV heads, D dim."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patches.attention.rope_split_per_sequence import PATCH as ROPE
from megatron_patches.attention.rope_split_per_sequence import positions_of
from megatron_patches.attention.sdpa import MIN_FILL, SHORT, group_lengths, packed_causal_attention

H, G, D = 6, 2, 5


def slow_attention(q, k, v, cu_seqlens, scale):
    """[T, H, D]: one query at a time."""
    rows = []
    for start, stop in pairwise(cu_seqlens):
        for t in range(start, stop):
            heads = []
            for head in range(q.shape[1]):
                shared = head // (q.shape[1] // k.shape[1])
                weights = torch.softmax(k[start : t + 1, shared] @ q[t, head] * scale, dim=0)
                heads.append(weights @ v[start : t + 1, shared])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def inputs(num_tokens: int, num_kv_heads: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, H, D), (num_tokens, num_kv_heads, D), (num_tokens, num_kv_heads, D)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("num_kv_heads", [G, H])
@pytest.mark.parametrize(
    "lengths",
    [(7,), (3, 1, 9, 2), (40, 38, 17, 5, 31, 1, 1), (20, 20, 20)],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_outputs_and_gradients_equal_the_slow_reference(lengths: tuple[int, ...], num_kv_heads: int) -> None:
    cu_seqlens = (0, *torch.tensor(lengths).cumsum(0).tolist())
    ours = inputs(sum(lengths), num_kv_heads, torch.float32)
    reference = [x.detach().double().requires_grad_() for x in ours]
    upstream = torch.randn(sum(lengths), H, D, dtype=torch.float64)
    out = packed_causal_attention(*ours, cu_seqlens)
    expected = slow_attention(*reference, cu_seqlens, D**-0.5)
    out.backward(upstream.float())
    expected.backward(upstream)
    # fp32 sums of at most 40 terms of size 1
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=1e-5)
    for found, wanted in zip(ours, reference, strict=True):
        torch.testing.assert_close(found.grad.double(), wanted.grad, atol=1e-5, rtol=1e-4)


def test_scale_replaces_the_usual_one() -> None:
    q, k, v = inputs(6, G, torch.float64)
    out = packed_causal_attention(q, k, v, (0, 2, 6), scale=0.3)
    torch.testing.assert_close(out, slow_attention(q, k, v, (0, 2, 6), 0.3))


def test_a_sequence_does_not_see_its_neighbours() -> None:
    q, k, v = (x.detach() for x in inputs(10, G, torch.float32))
    alone = packed_causal_attention(q[4:7], k[4:7], v[4:7], (0, 3))
    k[:4] += 3.0
    v[7:] -= 2.0
    assert torch.equal(packed_causal_attention(q, k, v, (0, 4, 7, 10))[4:7], alone)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_each_sequence_is_in_one_call_with_others_of_similar_length(lengths: list[int]) -> None:
    groups = group_lengths(tuple(lengths))
    assert sorted(i for group in groups for i in group) == [i for i, n in enumerate(lengths) if n]
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert longest <= SHORT or min(lengths[i] for i in group) >= MIN_FILL * longest


def test_equal_lengths_need_one_call() -> None:
    assert group_lengths((9, 9, 9, 9)) == ((0, 1, 2, 3),)


def test_positions_start_again_in_each_sequence() -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    assert positions_of(cu_seqlens).tolist() == [0, 1, 2, 0, 0, 1]


def test_packed_rope_equals_rotation_of_each_sequence_alone() -> None:
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.3, 0.07]))
    freqs = torch.cat([angles, angles], dim=1)[:, None, None]
    t = torch.randn(7, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rotated = ROPE.replacement(t, torch.tensor([0, 5, 7]), freqs.double())
    pairs = torch.complex(t[..., :3], t[..., 3:])
    turn = torch.polar(torch.ones(5, 3, dtype=torch.float64), angles.double())
    expected = pairs * turn[[0, 1, 2, 3, 4, 0, 1]][:, None]
    torch.testing.assert_close(rotated, torch.cat([expected.real, expected.imag], dim=-1))
