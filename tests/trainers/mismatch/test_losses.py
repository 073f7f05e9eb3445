"""Engines that are lost while a mismatch is looked into: that goes on without what they had not said, as does the run.

The engines are native ones that are lost when a test says so.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from rlhf.config.parallel import ParallelConfig
from rlhf.config.rollout import SamplingConfig
from rlhf.dist.agree import gather
from rlhf.trainers.mismatch.verdict import Cause
from tests.harness.ranks import run_ranks
from tests.trainers.losable import LosableEngine
from tests.trainers.mismatch.bench import LOSABLE, Bench, Layout
from tests.trainers.mismatch.faults import Plant, one_tensor, other_temperature, planted

TWO_ENGINES = Layout(ranks=2, actor=ParallelConfig(dp=2), dp=2, engine=LOSABLE, on_loss="replace")
SAMPLING = SamplingConfig(max_new_tokens=9)
EVERY_RUN = {("run", number) for number in range(1, 20)}

Lost = Sequence[set[tuple[str, int]]]
"""For each rank, in which of its engine's calls in the triage it is lost."""


def _triage(bench: Bench, plant: Plant, lost: Lost, *, given_back: bool = False) -> dict:
    """The record of a step, on rank 0; afterwards all engines answer rightly."""
    LosableEngine.calls, LosableEngine.plan = {}, frozenset()
    before = bench.recovery.num_losses
    bench.randomise(5)
    bench.sync()
    with planted(plant, bench, Random(1)) as fault:
        prompts, owners = bench.prompts(Random(2), 9, 20)
        rollout = bench.generate(fault.engine, prompts, SAMPLING)
        old = bench.score(rollout, owners, SAMPLING)
        if given_back:
            bench.policy_sync.forget()
        LosableEngine.calls, LosableEngine.plan = {}, frozenset(lost[bench.rank])
        assert bench.look(rollout, old, SAMPLING, engine=fault.engine).breach
    LosableEngine.plan = frozenset()
    assert not bench.recovery.is_lost
    record = {}
    if bench.rank == 0:
        record = json.loads(bench.folder.mismatch(bench.version, "json").read_text())
        assert record["lost_engines"] == bench.recovery.num_losses - before
    bench.sync()
    rollout = bench.generate(bench.engine, prompts, SAMPLING)
    assert not bench.look(rollout, bench.score(rollout, owners, SAMPLING), SAMPLING).breach
    (record,) = filter(None, gather(record, bench.everyone))
    return record


def _losses(folder: Path) -> None:
    torch.set_num_threads(1)
    bench = Bench("qwen3", TWO_ENGINES, folder)

    record = _triage(bench, other_temperature, [set(), {("run", 2)}])  # in the middle of its questions
    assert (record["cause"], record["lost_engines"]) == (Cause.SAMPLING, 1)
    assert "of rank 0" in record["scores"][-1]["finding"]
    assert "of rank 1" in record["scores"][-1]["finding"]  # asked again, once it is there again

    record = _triage(bench, one_tensor, [{("weights_updated", 1)}, set()])  # at the end of the comparison
    assert (record["cause"], record["lost_engines"]) == (Cause.WEIGHTS, 1)
    assert "1 of" in record["finding"]

    record = _triage(bench, other_temperature, [{("weights_updated", 2)}, {("restart", 1), ("run", 1)}])
    assert (record["cause"], record["lost_engines"]) == (Cause.SAMPLING, 3)

    record = _triage(bench, other_temperature, [set(), EVERY_RUN])  # one that no question leaves alive is given up
    assert (record["cause"], record["lost_engines"]) == (Cause.SAMPLING, 2)
    assert "of rank 1" not in record["scores"][-1]["finding"]

    record = _triage(bench, one_tensor, [EVERY_RUN, EVERY_RUN], given_back=True)
    assert (record["cause"], record["lost_engines"]) == ("unknown", 4)
    assert record["finding"] == "no engine could be compared or asked again"
    dist.barrier()


@pytest.mark.dist
def test_engines_that_are_lost_in_a_triage_are_replaced_and_it_says_what_it_could_not_see(tmp_path: Path) -> None:
    run_ranks(2, _losses, tmp_path)
