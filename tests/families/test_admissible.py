"""Layouts that a model's numbers forbid, each by the name of the setting."""

import pytest

from rlhf.config.checks import collecting
from rlhf.config.parallel import ParallelConfig
from rlhf.errors import ConfigError, LayoutError
from rlhf.families.admissible import check_layout
from tests.families.test_registry import spec


@pytest.mark.parametrize(
    ("family", "parallel", "named"),
    [
        ("qwen3", ParallelConfig(dp=2, ep=2), "actor.parallel.ep: 2 given for a qwen3 model, which has no experts"),
        ("llama", ParallelConfig(tp=2, etp=2), "actor.parallel.etp: 2 given for a llama model"),
        ("qwen3_moe", ParallelConfig(dp=2, ep=2), r"ep: 2 does not divide the model's num_experts = 5"),
        ("mixtral", ParallelConfig(dp=5, etp=5), r"etp: 5 does not divide the model's moe_ffn_size = 52"),
        ("qwen3_moe", ParallelConfig(tp=3), "tp: 3 does not divide the model's num_kv_heads = 2"),
    ],
)
def test_what_a_model_does_not_admit_is_refused_by_setting(family: str, parallel: ParallelConfig, named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        check_layout(spec(family), parallel, where="actor.parallel")


def test_all_that_is_wrong_is_told_at_once() -> None:
    with collecting() as faults:
        check_layout(spec("qwen3_moe"), ParallelConfig(tp=3, dp=14, ep=2, etp=7), where="actor.parallel")
    assert [fault.key for fault in faults.found] == [f"actor.parallel.{axis}" for axis in ("tp", "ep", "etp")]


def test_the_dense_ffn_size_of_a_model_with_experts_binds_nothing() -> None:
    odd = spec("qwen3_moe")
    assert odd.ffn_size % 8
    check_layout(spec("qwen3_moe"), ParallelConfig(tp=2, dp=10, ep=5, etp=4), where="actor.parallel")


def test_experts_must_share_out_the_ranks_of_a_stage() -> None:
    message = r"parallel.ep: ep\*etp = 3\*2 = 6 given; needs a divisor of tp\*dp = 2\*2 = 4"
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(tp=2, pp=3, dp=2, ep=3, etp=2)
