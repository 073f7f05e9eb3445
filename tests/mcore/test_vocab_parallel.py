"""Vocab-parallel log-probs and entropy against autograd over full float64 logits."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.errors import ConfigError, ShapeError
from rlhf.mcore.vocab_parallel import vocab_parallel_logprobs
from tests.harness.ranks import run_ranks

R, H, VOCAB = 23, 7, 37
PADDED = 44  # a multiple of 1, 2 and 4; with tp 4 the last rank holds 33..43: 4 real rows and 7 of padding


def _inputs(seed=0, rows=R):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, H, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    upstream = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    return hidden, weight, targets, upstream


def _reference(hidden, weight, targets, upstream, temperature, entropy_weight=1.0):
    """Log-probs, entropy, grad of hidden, grad of weight; by autograd, everything at once."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logp = ((hidden @ weight.T)[:, :VOCAB] / temperature).log_softmax(-1)
    logprobs = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (logprobs @ upstream[0] + entropy_weight * (entropy @ upstream[1])).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def _ours(
    hidden, weight, targets, upstream, temperature, chunk_tokens, group, entropy_weight=1.0, vocab=VOCAB, keep=False
):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        hidden,
        weight,
        targets,
        tp_group=group,
        vocab_size=vocab,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        keep_logits=keep,
    )
    loss = logprobs @ upstream[0].to(logprobs.dtype)
    if entropy_weight is not None:
        loss = loss + entropy_weight * (entropy @ upstream[1].to(entropy.dtype))
    loss.backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 100])
def test_values_and_gradients_equal_full_logits(temperature, chunk_tokens, keep):
    want = _reference(*_inputs(), temperature)
    got = _ours(*_inputs(), temperature, chunk_tokens, None, keep=keep)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # float64: only the order of sums differs


def test_fp32_inputs_give_fp32_outputs_to_rounding():
    hidden, weight, targets, upstream = _inputs()
    want = _reference(hidden, weight, targets, upstream, 0.6)
    got = _ours(hidden.float(), weight.float(), targets, upstream, 0.6, 4, None)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs.float(), rtol=2e-5, atol=2e-5)  # 37 terms of size 10, eps 6e-8


def test_bf16_inputs_err_no_more_than_their_logits():
    hidden, weight, targets, upstream = _inputs()
    hidden, weight = hidden.bfloat16().double(), weight.bfloat16().double()
    want = _reference(hidden, weight, targets, upstream, 1.0)
    got = _ours(hidden.bfloat16(), weight.bfloat16(), targets, upstream, 1.0, 4, None)
    assert got[0].dtype == torch.float32
    assert got[3].dtype == torch.bfloat16
    for ours, theirs in zip(got, want, strict=True):
        # logits up to 10 rounded to 8 bits: 0.02 each; gradients carry it relative to their size
        torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())


def test_padded_rows_get_no_gradient_and_change_nothing():
    hidden, weight, targets, upstream = _inputs()
    loud = weight.clone()
    loud[VOCAB:] = 1e4
    got, other = (_ours(hidden, w, targets, upstream, 1.0, 6, None) for w in (weight, loud))
    for a, b in zip(got, other, strict=True):
        assert torch.equal(a, b)
    assert not other[3][VOCAB:].any()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("entropy_weight", [None, 0.0])
def test_an_entropy_outside_the_loss_leaves_the_gradient_of_the_logprobs(entropy_weight, keep):
    want = _reference(*_inputs(), 1.0, entropy_weight=0.0)
    got = _ours(*_inputs(), 1.0, 6, None, entropy_weight=entropy_weight, keep=keep)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_loss_of_entropy_alone_has_its_gradient():
    hidden, weight, targets, upstream = _inputs()
    upstream[0] = 0.0
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    _, entropy = vocab_parallel_logprobs(
        hidden, weight, targets, tp_group=None, vocab_size=VOCAB, temperature=1.0, chunk_tokens=4
    )
    (entropy @ upstream[1]).backward()
    want = _reference(hidden.detach(), weight.detach(), targets, upstream, 1.0)
    torch.testing.assert_close(hidden.grad, want[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", [False, True])
def test_leaving_out_the_entropy_changes_no_logprob_and_no_gradient(keep):
    hidden, weight, targets, _ = _inputs()
    found = []
    for with_entropy in (True, False):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            leaf,
            weight,
            targets,
            tp_group=None,
            vocab_size=VOCAB,
            temperature=0.7,
            chunk_tokens=5,
            keep_logits=keep,
            with_entropy=with_entropy,
        )
        assert entropy.isnan().all() != with_entropy
        found.append((logprobs.detach(), torch.autograd.grad(logprobs.sum(), leaf)[0]))
    for with_it, without in zip(*found, strict=True):
        assert torch.equal(with_it, without)


def test_a_second_backward_pass_through_kept_logits_gives_the_same():
    hidden, weight, targets, _ = _inputs()
    hidden.requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(
        hidden, weight, targets, tp_group=None, vocab_size=VOCAB, temperature=0.7, chunk_tokens=4, keep_logits=True
    )
    first, second = (torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_no_tokens_give_empty_outputs_and_zero_gradients():
    logprobs, entropy, grad_hidden, grad_weight = _ours(*_inputs(rows=0), 1.0, 8, None)
    assert logprobs.shape == entropy.shape == (0,)
    assert grad_hidden.shape == (0, H)
    assert not grad_weight.any()


def test_far_apart_logits_stay_finite():
    hidden = torch.tensor([[300.0], [-300.0]])
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    args = hidden, weight, torch.tensor([1, 1]), torch.ones(2, 2)
    logprobs, entropy, grad_hidden, grad_weight = _ours(*args, 1.0, 8, None, vocab=3)
    torch.testing.assert_close(logprobs, torch.tensor([-600.0, 0.0]))
    torch.testing.assert_close(entropy, torch.zeros(2))
    assert grad_hidden.isfinite().all()
    assert grad_weight.isfinite().all()


class _Largest(TorchDispatchMode):
    """Records the most elements of any tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


def test_full_logits_never_exist():
    tokens, vocab, hidden_size, chunk = 64, 501, 3, 8
    hidden = torch.randn(tokens, hidden_size)
    weight = torch.randn(vocab, hidden_size)
    targets = torch.randint(0, vocab, (tokens,))
    with _Largest() as seen:
        _ours(hidden, weight, targets, torch.ones(2, tokens), 0.7, chunk, None, vocab=vocab)
    assert seen.elements == chunk * vocab  # not tokens * vocab; and the recorder saw the chunks


def test_bad_input_is_named():
    hidden, weight, targets, upstream = _inputs()
    with pytest.raises(ShapeError, match=r"hidden \(23, 7\), weight \(44, 7\), targets \(22,\)"):
        _ours(hidden, weight, targets[1:], upstream, 1.0, 4, None)
    with pytest.raises(ConfigError, match="temperature 0"):
        _ours(hidden, weight, targets, upstream, 0.0, 4, None)


def _check_cut() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (dist.group.WORLD, pairs[rank // 2]):
        tp = group.size()
        mine = slice(dist.get_rank(group) * PADDED // tp, (dist.get_rank(group) + 1) * PADDED // tp)
        for temperature, chunk, rows in ((1.0, 4, R), (0.6, 30, R), (1.0, 4, 0)):
            hidden, weight, targets, upstream = _inputs(rows=rows)
            logprobs, entropy, grad_hidden, grad_weight = _ours(
                hidden, weight[mine], targets, upstream, temperature, chunk, group
            )
            dist.all_reduce(grad_hidden, group=group)  # as the gather's backward does
            want = _reference(hidden, weight, targets, upstream, temperature)
            got = logprobs, entropy, grad_hidden, grad_weight
            for ours, theirs in zip(got, (*want[:3], want[3][mine]), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # a rank that holds nothing but padding
    hidden, weight, targets, upstream = _inputs()
    mine = slice(rank * PADDED // world, (rank + 1) * PADDED // world)
    few = 20
    got = _ours(hidden, weight[mine], targets % few, upstream, 1.0, 4, dist.group.WORLD, vocab=few)
    alone = _ours(hidden, weight, targets % few, upstream, 1.0, 4, None, vocab=few)
    torch.testing.assert_close(got[0], alone[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], alone[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[3], alone[3][mine], rtol=1e-12, atol=1e-12)


@pytest.mark.dist
def test_cut_over_2_and_4_ranks_equals_full_logits():
    run_ranks(4, _check_cut)
