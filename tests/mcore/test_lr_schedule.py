"""Learning rates worked out by hand."""

import pytest

from rlhf.config.model import OptimConfig
from rlhf.mcore.lr_schedule import learning_rate


def _rates(**settings):
    config = OptimConfig(lr=8.0, **settings)
    return [learning_rate(config, step) for step in range(8)]


def test_constant_after_a_warm_up():
    assert _rates(warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert _rates() == [8.0] * 8


def test_linear_falls_to_the_minimum_and_stays():
    assert _rates(schedule="linear", warmup_steps=1, decay_steps=4, min_lr=4.0) == [8, 8, 7, 6, 5, 4, 4, 4]


def test_cosine_is_half_way_in_the_middle():
    rates = _rates(schedule="cosine", decay_steps=4, min_lr=2.0)
    # 2 + 3 (1 + cos(pi k / 4)); cos(pi / 4) = 0.7071068
    assert rates == pytest.approx([8.0, 7.1213203, 5.0, 2.8786797, 2.0, 2.0, 2.0, 2.0])
