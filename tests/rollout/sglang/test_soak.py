"""200 syncs and rollouts in a row: the memory of every process and /dev/shm stay as they are."""

from dataclasses import replace

import pytest

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.rollout.sglang.layout import sglang_layout
from tests.harness.ranks import run_ranks
from tests.reshard.gloo import as_table
from tests.rollout.sglang.soak_ranks import soak
from tests.rollout.sglang.test_layout import SPECS
from tests.rollout.sglang.tiny import needs_sglang

pytestmark = [*needs_sglang, pytest.mark.dist, pytest.mark.timeout(600)]  # engines start and start again


def test_memory_is_flat_over_200_syncs_and_rollouts(tmp_path):
    """The weights are large enough (12 MiB) for one that is kept a round to show."""
    spec = replace(SPECS["qwen3"], hidden_size=256, ffn_size=512, num_layers=4)
    src = megatron_layout(spec, ParallelConfig(pp=2), head=Head.LM, dtype="float32")
    dst = sglang_layout(spec, tp=2, ep=1, dp=1, first_rank=0, dtype="float32")
    run_ranks(2, soak, spec, as_table(src), as_table(dst), tmp_path)
