"""Which rollout settings go together."""

from contextlib import nullcontext

import pytest

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.sglang import SGLangConfig
from rlhf.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batching": "static"}, "rollout.batching: 'static' given; needs one of dynamic, buckets"),
        ({"bucket_tokens": (64, 64)}, r"rollout.bucket_tokens: \[64, 64\] given; needs prompt lengths in ascending"),
        ({"bucket_tokens": ()}, "rollout.bucket_tokens"),
        ({"bucket_tokens": (0, 8)}, "rollout.bucket_tokens"),
        ({"oversample": -0.1, "tail": "drop"}, "rollout.oversample: -0.1 given; needs 0.0 to 4.0"),
        ({"oversample": float("nan"), "tail": "drop"}, "rollout.oversample: nan given"),
        ({"oversample": 25, "tail": "drop"}, "rollout.oversample: 25 given"),
        ({"oversample": 0.25}, "rollout.tail: wait given with rollout.oversample = 0.25; needs wait where"),
        ({"tail": "continue"}, "rollout.tail: continue given with rollout.oversample = 0.0; needs wait where"),
        ({"oversample": 0.25, "tail": "keep"}, "rollout.tail: 'keep' given; needs one of wait, drop, continue"),
    ],
)
def test_routing_settings_that_do_not_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutConfig(**settings)


def test_oversampling_with_a_tail_is_taken() -> None:
    assert RolloutConfig(oversample=0.25, tail="continue", batching="buckets", bucket_tokens=(8, 32)).tail == "continue"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": float("inf")}, "sampling.temperature: inf given; needs a number"),
        ({"temperature": float("nan")}, "sampling.temperature: nan given"),
        ({"stop_token_ids": (3, -1, 2**70)}, rf"sampling.stop_token_ids: \[-1, {2**70}\] given; needs ids"),
    ],
)
def test_sampling_that_no_engine_can_do_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings)


@pytest.mark.parametrize(
    ("sampling", "backend", "named"),
    [
        ({"min_p": 0.1}, "pytorch", "min_p: 0.1 given"),
        ({"top_k": 1}, "pytorch", "top_k: 1 given"),
        ({"top_k": 1, "temperature": 0.0}, "pytorch", ""),
        ({"top_k": 2, "top_p": 0.5}, "pytorch", ""),
        ({"min_p": 0.1}, "by_seed", ""),
    ],
)
def test_what_sglangs_own_sampler_dies_of_with_batch_invariant_kernels_is_refused(
    sampling: dict, backend: str, named: str
) -> None:
    options = SGLangConfig(deterministic=True, sampling_backend=backend)
    with pytest.raises(ConfigError, match=f"eval.sampling.{named}") if named else nullcontext():
        RolloutConfig(engine="sglang", sglang=options).check_draws("eval.sampling", SamplingConfig(**sampling))
