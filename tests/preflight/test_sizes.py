"""Sizes as text: what they mean, and what is said of those that mean nothing."""

import pytest

from rlhf.config.parallel import ParallelConfig
from rlhf.errors import ConfigError
from rlhf.preflight.sizes import EngineSizes, read_engines, read_parallel


def test_sizes_are_a_number_after_a_name():
    assert read_parallel("tp8,pp4,dp8", 80, where="--src") == ParallelConfig(tp=8, pp=4, dp=8)
    assert read_parallel("tp=2, first_rank4", 3, where="--src") == ParallelConfig(tp=2, first_rank=4)
    told = read_parallel("pp2,layers1/2", 3, where="--src")
    assert told == ParallelConfig(pp=2, layers_per_stage=(1, 2))


def test_layers_that_do_not_divide_are_spread():
    assert read_parallel("pp4", 126, where="--src").layers_per_stage == (32, 32, 31, 31)
    assert read_parallel("pp3", 126, where="--src").layers_per_stage == ()


def test_engines_fill_the_training_ranks_unless_told():
    trained = range(256)
    assert read_engines("tp8", trained, where="--dst") == EngineSizes(tp=8, dp=32)
    assert read_engines("tp3", range(8), where="--dst") == EngineSizes(tp=3, dp=2)
    assert read_engines("tp8,dp4", trained, where="--dst").ranks == range(32)
    assert read_engines("tp16", range(8), where="--dst") == EngineSizes(tp=16, dp=1)
    assert read_engines("tp8,first_rank128", trained, where="--dst") == EngineSizes(tp=8, dp=16, first_rank=128)
    assert read_engines("tp8,first_rank256", trained, where="--dst") == EngineSizes(tp=8, dp=1, first_rank=256)
    assert read_engines("tp2", range(4, 8), where="--dst") == EngineSizes(tp=2, dp=2, first_rank=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no sizes"),
        ("8", r"'8' in '8'; needs one of tp, pp"),
        ("tp8,qp2", r"'qp2' in .*; needs one of tp, pp"),
        ("tp8,tp4", "tp comes twice"),
        ("tp0", "needs at least 1"),
        ("tp8/4", "'tp8/4'"),
        ("pp200", r"pp\*vpp = 200 for 80 layers"),
        ("pp2,layers40/41", r"layers40/41 given; needs pp\*vpp = 2 counts that add up to 80"),
        ("tp2,ep3", "3 given; needs a divisor of tp"),
        ("pp3,layers40/40", r"needs pp\*vpp = 3 counts"),
    ],
)
def test_what_means_nothing_is_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=rf"^--src(\.ep)?: .*{message}"):
        read_parallel(text, 80, where="--src")


def test_an_engines_experts_are_shared_evenly():
    assert read_engines("tp8,ep4", range(8), where="--dst").ep == 4
    with pytest.raises(ConfigError, match="--dst: ep3 does not divide tp8"):
        read_engines("tp8,ep3", range(8), where="--dst")
