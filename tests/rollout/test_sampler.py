"""Which token a uniform number stands for."""

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.rollout.native.sampler import sample
from rlhf.rollout.seeds import sample_seed, uniforms

VOCAB, PADDED = 150, 192


def padded_logits(rows: int = 1, seed: int = 3) -> torch.Tensor:
    """[PADDED, rows]; the padding is tempting."""
    logits = torch.randn(VOCAB, 1, generator=torch.Generator().manual_seed(seed)) * 2
    return torch.cat([logits, torch.full((PADDED - VOCAB, 1), 50.0)]).repeat(1, rows)


def reference_probs(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """Straight from the definitions of temperature, then top-k, then top-p, then min-p; float64 [VOCAB]."""
    probs = (logits[:VOCAB, 0].double() / sampling.temperature).softmax(0)
    order = probs.argsort(descending=True)
    kept = order[: sampling.top_k or VOCAB].tolist()
    probs = torch.zeros_like(probs).index_copy(0, torch.tensor(kept), probs[kept])
    probs /= probs.sum()
    mass, nucleus = 0.0, []
    for token in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += float(probs[token])
    nucleus = [token for token in nucleus if probs[token] >= sampling.min_p * probs.max()]
    probs = torch.zeros_like(probs).index_copy(0, torch.tensor(nucleus), probs[nucleus])
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.3, 17, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.7, 0, 0.97, 0.0),
        (0.9, 30, 0.7, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1.0, 0.07),
        (1.5, 30, 1.0, 0.2),
        (1.5, 30, 0.9, 0.1),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_tokens_follow_the_cut_distribution(temperature, top_k, top_p, min_p):
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    draws = 20_000
    logits, expected = padded_logits(), reference_probs(padded_logits(), sampling)
    numbers = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws  # an even grid: counts are exact to 1
    tokens, logprobs = sample(logits.repeat(1, draws).T, VOCAB, numbers, sampling)
    counts = tokens.bincount(minlength=PADDED)
    assert counts[VOCAB:].sum() == 0
    assert (counts[:VOCAB] - draws * expected).abs().max() <= 1.01
    assert (counts[:VOCAB][expected == 0] == 0).all()
    whole = (logits[:VOCAB, 0] / temperature).log_softmax(0)
    torch.testing.assert_close(logprobs, whole[tokens], atol=2e-6, rtol=0)


def test_counts_of_hashed_uniforms_pass_a_chi_square_test():
    sampling = SamplingConfig(temperature=1.2, top_k=25)
    expected = reference_probs(padded_logits(), sampling)
    seeds = torch.tensor([sample_seed(1, sample, 0) for sample in range(10_000)])
    tokens, _ = sample(padded_logits(10_000).T, VOCAB, uniforms(seeds, torch.full_like(seeds, 4)), sampling)
    kept = expected > 0
    counts = tokens.bincount(minlength=PADDED)[:VOCAB]
    chi2 = float(((counts - 10_000 * expected)[kept] ** 2 / (10_000 * expected)[kept]).sum())
    assert chi2 < 55  # 24 degrees of freedom: 99.97 % of right samplers stay below


def test_logprobs_of_a_large_vocabulary_are_those_of_float64():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(49152, 3, generator=generator) * 4
    tokens, logprobs = sample(logits.T.clone(), 49000, torch.rand(3, generator=generator).double(), SamplingConfig())
    exact = logits[:49000].double().log_softmax(0).gather(0, tokens[None])[0]
    # logits up to 20 have a spacing of 2e-6 in float32; adding the vocabulary up entry by entry would err by 1e-4
    torch.testing.assert_close(logprobs.double(), exact, atol=2e-6, rtol=0)


def test_zero_temperature_takes_the_largest_and_reports_the_untempered_logprob():
    logits = padded_logits()
    tokens, logprobs = sample(logits.T.clone(), VOCAB, torch.zeros(1).double(), SamplingConfig(temperature=0.0))
    assert tokens.item() == logits[:VOCAB, 0].argmax().item()
    torch.testing.assert_close(logprobs, logits[:VOCAB, 0].log_softmax(0)[tokens])


def test_extreme_uniforms_never_choose_an_impossible_token():
    logits = torch.full((PADDED, 4), float("-inf"))
    logits[5], logits[70], logits[149] = -80.0, 0.0, -90.0
    logits[:, 2:] = float("-inf")
    logits[[3, 4], 2:] = 1.0
    last = 1.0 - 2.0**-53
    tokens, _ = sample(logits.T, VOCAB, torch.tensor([0.0, last, 0.0, last], dtype=torch.float64), SamplingConfig())
    assert tokens.tolist()[1:] == [70, 3, 4]
    assert tokens[0] in (5, 70)


def test_the_last_uniform_stays_inside_the_vocabulary_whatever_the_rounding():
    # a block's float32 sum may exceed the sum of its entries: without a guard the search runs off the block's end
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(4)) * 3
    last = torch.full((3000,), 1.0 - 2.0**-53, dtype=torch.float64)
    tokens, _ = sample(logits.T.clone(), 64, last, SamplingConfig())
    assert int(tokens.max()) == 63
    assert (tokens > 55).all()  # the entries behind it have no more weight than float32 rounds away


def test_a_block_without_weight_is_never_chosen_by_zero():
    logits = torch.full((PADDED, 1), float("-inf"))
    logits[[70, 71]] = 0.0
    tokens, _ = sample(logits.T, VOCAB, torch.zeros(1, dtype=torch.float64), SamplingConfig())
    assert tokens.tolist() == [70]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_nucleus_of_hundreds_of_tokens_is_found(top_p):
    vocab, draws = 1900, 3000  # the search starts with the 256 most likely, far from enough of a flat distribution
    logits = torch.randn(1920, 1, generator=torch.Generator().manual_seed(2)) * 0.3
    probs = logits[:vocab, 0].double().softmax(0)
    order = probs.argsort(descending=True)
    size = int((probs[order].cumsum(0) - probs[order] < top_p).sum())
    assert size > 256
    numbers = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens, _ = sample(logits.repeat(1, draws).T, vocab, numbers, SamplingConfig(top_p=top_p))
    kept = torch.zeros_like(probs).index_copy(0, order[:size], probs[order[:size]])
    counts = tokens.bincount(minlength=vocab)
    assert (counts - draws * kept / kept.sum()).abs().max() <= 1.01
    assert (counts[kept == 0] == 0).all()


def test_uniforms_are_even_in_seed_and_position_and_unlike_their_neighbours():
    seeds = torch.tensor([sample_seed(9, sample, 0) for sample in range(400)])
    drawn = uniforms(seeds[:, None], torch.arange(500))
    assert 0 <= float(drawn.min()) < 1e-4
    assert 1 - 1e-4 < float(drawn.max()) < 1
    assert abs(float(drawn.mean()) - 0.5) < 5 / (12 * drawn.numel()) ** 0.5
    pairs = torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.01
    pairs = torch.stack([drawn[:-1].flatten(), drawn[1:].flatten()])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.01


def test_uniforms_equal_splitmix64():
    def reference(seed: int, position: int) -> float:
        mask, state = 2**64 - 1, seed + (position + 1) * 0x9E3779B97F4A7C15
        z = state & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) / 2**53

    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        found = uniforms(torch.tensor([seed]), torch.tensor([0, 1, 4095])).tolist()
        assert found == [reference(seed, position) for position in (0, 1, 4095)]


def test_seeds_differ_in_every_argument():
    seeds = {sample_seed(run, sample, attempt) for run in range(9) for sample in range(90) for attempt in range(9)}
    assert len(seeds) == 9 * 90 * 9
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
