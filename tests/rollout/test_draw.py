"""Cuts that differ from row to row, as SGLang's schedulers have them; alike ones are in `test_sampler.py`."""

from types import SimpleNamespace

import pytest
import torch

from rlhf.rollout.draw import Cuts, block_sums, draw
from rlhf.rollout.seeds import sample_seed, uniforms
from rlhf.rollout.sglang.inside.sampling import tokens_by_seed

VOCAB = 1920
ALL = 1 << 30
"""SGLang's word for no top-k."""
SETTINGS = [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.6, 0.0), (300, 0.9, 0.0), (0, 1.0, 0.3), (40, 0.5, 0.2), (1, 1.0, 0.0)]


def rows(count: int) -> torch.Tensor:
    return (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)) * 0.7).softmax(1)


@pytest.mark.parametrize(
    "settings", [SETTINGS, SETTINGS[:2], SETTINGS[:3], SETTINGS[1:2] + SETTINGS[3:4], SETTINGS[5:]]
)
def test_each_row_is_cut_by_its_own_settings_and_drawn_by_its_own_seed(settings):
    weights = rows(500)
    mine = [settings[row % len(settings)] for row in range(500)]
    seeds = torch.tensor([sample_seed(1, row, 0) for row in range(500)])
    positions = torch.arange(500) * 3
    info = SimpleNamespace(
        top_ks=torch.tensor([top_k or ALL for top_k, _, _ in mine], dtype=torch.int32),
        top_ps=torch.tensor([top_p for _, top_p, _ in mine]),
        min_ps=torch.tensor([min_p for _, _, min_p in mine]),
        need_top_k_sampling=any(top_k for top_k, _, _ in mine),
        need_top_p_sampling=any(top_p < 1 for _, top_p, _ in mine),
        need_min_p_sampling=any(min_p for _, _, min_p in mine),
        max_top_k=max(top_k for top_k, _, _ in mine) if all(top_k for top_k, _, _ in mine) else None,
        is_any_greedy=any(top_k == 1 for top_k, _, _ in mine),
        sampling_seed=seeds,
    )
    found = tokens_by_seed(weights, info, positions)
    numbers = uniforms(seeds, positions)
    for row, (top_k, top_p, min_p) in enumerate(mine):
        alone = weights[row : row + 1]
        cuts = Cuts.alike(top_k, top_p, min_p, VOCAB, alone.device)
        assert found[row] == draw(alone, block_sums(alone), numbers[row : row + 1], cuts)
        if top_k == 1:
            assert found[row] == alone.argmax()


def test_a_vocabulary_that_is_no_multiple_of_a_block_has_no_token_beyond_it():
    probs = torch.full((200, 131), 1 / 131)
    seeds = torch.arange(200)
    info = SimpleNamespace(
        top_ks=torch.full((200,), ALL, dtype=torch.int32),
        top_ps=torch.ones(200),
        min_ps=torch.zeros(200),
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
        max_top_k=None,
        is_any_greedy=False,
        sampling_seed=seeds,
    )
    tokens = tokens_by_seed(probs, info, torch.zeros(200, dtype=torch.int32))
    wanted = (uniforms(seeds, torch.zeros(200, dtype=torch.int64)) * 131).long()
    assert (tokens - wanted).abs().max() <= 1  # rounding at the edge of a token
    assert int(tokens.max()) < 131
    assert tokens.unique().numel() > 80
