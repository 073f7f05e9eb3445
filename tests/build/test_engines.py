"""What a job says of its engines before it starts any."""

from types import SimpleNamespace

import pytest
import torch

from rlhf.build.engines import start_engine
from rlhf.config.rollout import RolloutConfig
from rlhf.config.sglang import SGLangConfig


@pytest.mark.parametrize(("device", "lines"), [("cpu", 1), ("cuda", 0)])
def test_settings_without_effect_on_cpus_are_told_once_on_the_console_before_an_engine_starts(device, lines) -> None:
    """By the rank that has the console, though it may have no engine itself."""
    said: list[str] = []
    groups = SimpleNamespace(device_group=lambda ranks: None, cpu_group=lambda ranks: None)
    ranks = SimpleNamespace(groups=groups, rank=0, device=torch.device(device))
    config = SimpleNamespace(
        rollout=RolloutConfig(engine="sglang", first_rank=1, sglang=SGLangConfig(mem_fraction_static=0.8))
    )
    for desk in (SimpleNamespace(display=SimpleNamespace(note=said.append)), None):
        site = SimpleNamespace(ranks=ranks, desk=desk)
        start_engine(config, folder=None, stop_ids=(), site=site)
    assert len(said) == lines
    assert all("mem_fraction_static=0.8 (rollout.kv_cache_tokens alone" in line for line in said)
