"""Evaluation: its own sampling, several responses a problem, and no trace of it in the training stream."""

import json
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.build.loops import build_loop
from rlhf.config.rollout import SamplingConfig
from rlhf.config.run import EvalConfig
from rlhf.data.batch import PromptBatch, PromptRecord, RewardResult, Rollout, ScoredRollout
from rlhf.data.ragged import Ragged
from rlhf.dist.groups import GroupFactory
from rlhf.trainers.evaluation import Evaluation
from rlhf.trainers.ppo import PPOLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here

OWN = SamplingConfig(temperature=0.7, top_k=5, max_new_tokens=3)
SCORES = {0: [[1.0, 0.0, 0.0, 2.0], [0.0, 0.5, 0.0, 0.0]], 1: [[1.0, 1.0, 1.0, 1.0]]}  # of the problems of each rank


@dataclass
class FakePool:
    """Answers every prompt with one token and remembers how it was asked to sample."""

    asked: list[SamplingConfig] = field(default_factory=list)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, takes_part: bool, is_lost: bool) -> Rollout:
        assert takes_part
        assert not is_lost
        self.asked.append(sampling)
        ones = torch.ones(len(prompts), dtype=torch.int64)
        finish = torch.zeros(len(prompts), dtype=torch.int8)
        return Rollout(prompts, Ragged(ones, ones), Ragged(ones.float(), ones), finish, *[Ragged(ones, ones)] * 2)


@dataclass
class FakeScorer:
    """Gives known scores."""

    scores: list[float]

    def score(self, rollout: Rollout) -> ScoredRollout:
        results = tuple(RewardResult(score) for score in self.scores)
        return ScoredRollout(rollout, torch.tensor(self.scores), torch.ones(len(rollout), dtype=torch.bool), results)

    def texts(self, rollout: Rollout) -> list[str]:
        return [f"sample {i}" for i in rollout.prompts.sample_ids.tolist()]


def _mean_and_pass_at_k() -> None:
    rank = dist.get_rank()
    mine = SCORES[rank]
    ids = torch.arange(len(mine)).repeat_interleave(4)
    tokens = Ragged(torch.ones(len(ids), dtype=torch.int64), torch.ones(len(ids), dtype=torch.int64))
    prompts = PromptBatch(
        4 * ids + torch.arange(4).repeat(len(mine)), ids, tokens, (PromptRecord("p", "a", {}),) * len(ids)
    )
    pool = FakePool()
    evaluation = Evaluation(
        config=EvalConfig(samples_per_prompt=4, pass_k=2, sampling=OWN),
        pool=pool,
        prompts=prompts,
        scorer=FakeScorer([score for scores in mine for score in scores]),
        group=dist.new_group([0, 1], backend="gloo"),
    )
    found = evaluation.judge(5, evaluation.ask())
    assert pool.asked == [OWN]
    assert (found.problems, found.solved, found.reward) == (3, 6 / 12, 7.5 / 12)
    # 2 of 4 solved: 1 - C(2, 2) / C(4, 2) = 5/6; none: 0; all: 1
    assert found.pass_at_k == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert [record.response for record in found.samples] == ["sample 0", "sample 4", "sample 0"]  # one a problem


def _run(folder: Path, groups: GroupFactory, *overrides: str, evaluate: bool = True) -> tuple[list[dict], list[dict]]:
    """Metrics and samples of a whole run; without evaluation the held-out rows are kept from training all the same."""
    config = load(
        folder, *overrides, "actor.parallel.dp=2", "critic.parallel.tp=2", "reference.parallel.dp=2", "rollout.dp=2"
    )
    run_folder = folder / "runs" / config.name
    loop = build_loop(config, ranks_here(run_folder, groups))
    assert isinstance(loop, PPOLoop)
    if not evaluate:
        loop = replace(loop, config=replace(config, data=replace(config.data, held_out=0)))
    loop.run()
    dist.barrier()
    return tuple(
        [json.loads(line) for line in (run_folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "samples")
    )


def _training(metrics: list[dict], samples: list[dict]) -> list[dict]:
    """All numbers that evaluation and the clock have no part in, and the training samples."""
    # an evaluation takes its time, and brings new weights before the next step does
    aside = ("time/", "rate/", "rollout/", "clock/", "held_out/", "sync/")
    numbers = [{k: v for k, v in line.items() if not k.startswith(aside)} for line in metrics if line["step"]]
    return numbers + [sample for sample in samples if sample["split"] == "train"]


def _evaluation_leaves_no_trace(folder: Path) -> None:
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    without = _run(folder, groups, "name=without", evaluate=False)
    settings = "{temperature: 0.7, top_k: 5, max_new_tokens: 3}"
    often = _run(
        folder,
        groups,
        *(
            "name=often",
            "eval.every_steps=1",
            "eval.samples_per_prompt=3",
            "eval.pass_k=2",
            f"eval.sampling={settings}",
        ),
    )
    assert not any("held_out/solved" in line for line in without[0])
    assert all(line["held_out/problems"] == 4 for line in often[0])
    assert len(often[0]) == 4
    lengths = {
        split: {s["response_tokens"] for s in often[1] if s["split"] == split} for split in ("train", "held_out")
    }
    assert max(lengths["held_out"]) == 3
    assert max(lengths["train"]) == 7
    assert _training(*often) == _training(*without)


def _all_checks(folder: Path) -> None:
    torch.set_num_threads(1)
    _mean_and_pass_at_k()
    _evaluation_leaves_no_trace(folder)


@pytest.mark.dist
def test_evaluation_samples_its_own_way_and_leaves_no_trace_in_training(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(2, _all_checks, tmp_path)
