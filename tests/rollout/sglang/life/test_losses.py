"""SGLang's own processes, killed, stopped and hung in rollouts and in a weight sync: found, named, replaced.

Schedulers that are killed or stopped in a rollout: tests/scripts/test_sglang_jobs.py. What else can befall them: the
fake hosts of test_watch.py.
"""

from dataclasses import replace

import pytest

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.rollout.sglang.layout import sglang_layout
from tests.harness.ranks import run_ranks
from tests.reshard.gloo import as_table
from tests.rollout.sglang.life.loss_ranks import lose_and_replace
from tests.rollout.sglang.test_layout import SPECS
from tests.rollout.sglang.tiny import needs_sglang

pytestmark = [*needs_sglang, pytest.mark.dist, pytest.mark.timeout(600)]  # engines start and start again


def test_an_engine_that_loses_any_of_its_processes_is_found_named_and_replaced_and_no_row_is_lost_or_twice(tmp_path):
    spec = replace(SPECS["qwen3"], hidden_size=128, ffn_size=256, num_layers=2)
    src = megatron_layout(spec, ParallelConfig(pp=2), head=Head.LM, dtype="float32")
    dst = sglang_layout(spec, tp=2, ep=1, dp=1, first_rank=0, dtype="float32")
    run_ranks(2, lose_and_replace, spec, as_table(src), as_table(dst), tmp_path)
