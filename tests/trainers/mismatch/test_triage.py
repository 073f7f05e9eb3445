"""Five kinds of planted faults, twenty times each, are named; a hundred clean runs are left alone.

Each trial has weights, prompts, lengths and sampling of its own; families and layouts take turns. Real models
throughout: Megatron's as the trainer, the native engine, the weight sync between them.
"""

import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch

from rlhf.config.parallel import ParallelConfig
from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import Rollout
from rlhf.data.ragged import Ragged
from rlhf.errors import MismatchError
from rlhf.trainers.mismatch.verdict import Cause
from tests.harness.ranks import run_ranks
from tests.trainers.mismatch.bench import FAMILIES, Bench, Layout
from tests.trainers.mismatch.faults import FAULTS, Plant, boundaries_wrong, one_tensor, padded_rows_seen, planted

pytestmark = pytest.mark.dist
ALONE, PAIR = Layout(), 2
LAYOUTS = (
    Layout(ranks=PAIR, actor=ParallelConfig(tp=2), tp=2),
    Layout(ranks=PAIR, actor=ParallelConfig(pp=2), dp=2),
    Layout(ranks=PAIR, actor=ParallelConfig(dp=2), dp=2),
)
TRIALS, TRIALS_OF_PAIRS = 14, 6
"""Of each kind of fault."""
CLEAN, CLEAN_OF_PAIRS = 82, 18


@dataclass(frozen=True)
class Trial:
    """One fault, and what became of it."""

    wanted: str
    named: str
    """The cause; empty: nothing was flagged."""
    what: str


def drawn_sampling(draw: Random, *, temperatures: tuple[float, ...]) -> SamplingConfig:
    return SamplingConfig(
        temperature=draw.choice(temperatures),
        top_p=draw.choice([1.0, 1.0, 0.9, 0.95]),
        top_k=draw.choice([0, 0, 0, 20]),
        max_new_tokens=draw.choice([4, 7, 12]),
    )


def trial(bench: Bench, cause: Cause, plant: Plant, draw: Random) -> Trial:
    bench.randomise(draw.randrange(2**31))
    bench.sync()
    sampling = drawn_sampling(draw, temperatures=(0.6, 0.8, 1.0, 1.0, 1.3))
    with planted(plant, bench, draw) as fault:
        prompts, owners = bench.prompts(draw, draw.randint(6, 12), draw.choice([4, 12, 30]))
        rollout = bench.generate(fault.engine, prompts, sampling)
        old = bench.score(rollout, owners, sampling)
        found = bench.look(rollout, old, sampling, engine=fault.engine, replay_rows=4)
    if not found.breach:
        return Trial(cause.value, "", f"{fault.what}: {found}")
    text = bench.folder.mismatch(bench.version, "txt").read_text() if bench.rank == 0 else ""
    return Trial(cause.value, bench.named(), f"{fault.what}, {sampling}\n{text}")


def clean_run(bench: Bench, draw: Random) -> bool:
    """Whether it was flagged."""
    bench.randomise(draw.randrange(2**31), scale=draw.choice([0.5, 1.0]))
    bench.sync()
    sampling = drawn_sampling(draw, temperatures=(0.0, 0.1, 0.3, 0.6, 1.0, 1.0, 2.0))
    prompts, owners = bench.prompts(draw, draw.randint(1, 12), draw.choice([1, 12, 60]))
    rollout = bench.generate(bench.engine, prompts, sampling)
    found = bench.look(rollout, bench.score(rollout, owners, sampling), sampling)
    assert found.tokens == len(owners) * sampling.max_new_tokens
    return bool(found.breach)


def faults(layouts: tuple[Layout, ...], count: int) -> Iterator[tuple[str, Layout, Cause, int]]:
    """(family, layout, cause, number), so that trials with the same model come one after the other."""
    for at, family in enumerate(FAMILIES):
        for number in range(at, count, len(FAMILIES)):
            for cause in Cause:
                yield family, layouts[number % len(layouts)], cause, number


def faults_on_ranks(layouts: tuple[Layout, ...], count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    benches: dict[tuple[str, Layout], Bench] = {}
    found = []
    for family, layout, cause, number in faults(layouts, count):
        if (family, layout) not in benches:
            benches[family, layout] = Bench(family, layout, folder)
        plants = FAULTS[cause]
        draw = Random(f"{family} {layout} {cause.value} {number}")
        found.append(trial(benches[family, layout], cause, plants[number % len(plants)], draw))
    if benches and next(iter(benches.values())).rank == 0:
        rows = [[one.wanted, one.named, one.what] for one in found]
        (folder / f"faults_{layouts[0].ranks}.json").write_text(json.dumps(rows))


def clean_on_ranks(layouts: tuple[Layout, ...], count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for at, (family, dtype) in enumerate((f, d) for f in FAMILIES for d in ("float32", "bfloat16")):
        bench = Bench(family, layouts[at % len(layouts)], folder, dtype=dtype)
        for number in range(at, count, 2 * len(FAMILIES)):
            assert not clean_run(bench, Random(f"{family} {dtype} {number}")), (
                bench.folder.mismatch(bench.version, "txt").read_text() if bench.rank == 0 else number
            )


def test_planted_faults_are_named(tmp_path: Path) -> None:
    run_ranks(1, faults_on_ranks, (ALONE,), TRIALS, tmp_path)
    run_ranks(PAIR, faults_on_ranks, LAYOUTS, TRIALS_OF_PAIRS, tmp_path)
    found = [Trial(*row) for n in (1, PAIR) for row in json.loads((tmp_path / f"faults_{n}.json").read_text())]
    wrong = [
        f"{one.wanted} was called {one.named or 'nothing'}: {one.what}" for one in found if one.wanted != one.named
    ]
    assert len(found) == 20 * len(Cause)
    for cause in Cause:
        of_cause = [one for one in found if one.wanted == cause.value]
        assert len(of_cause) == 20
        assert sum(one.named == cause.value for one in of_cause) >= 19, "\n".join(wrong)


def test_clean_runs_are_left_alone(tmp_path: Path) -> None:
    run_ranks(1, clean_on_ranks, (ALONE,), CLEAN, tmp_path)
    run_ranks(PAIR, clean_on_ranks, LAYOUTS, CLEAN_OF_PAIRS, tmp_path)
    assert not (tmp_path / "mismatch").exists()


def weights_that_were_given_back(folder: Path) -> None:
    torch.set_num_threads(1)
    bench = Bench("qwen3", ALONE, folder)
    for cause, plant in (
        (Cause.WEIGHTS, one_tensor),
        (Cause.PACKING, padded_rows_seen),
        (Cause.PACKING, boundaries_wrong),
    ):
        bench.randomise(5)
        bench.sync()
        sampling = SamplingConfig(max_new_tokens=9)
        with planted(plant, bench, Random(1)) as fault:
            prompts, owners = bench.prompts(Random(2), 9, 20)
            rollout = bench.generate(fault.engine, prompts, sampling)
            old = bench.score(rollout, owners, sampling)
            bench.policy_sync.forget()
            assert bench.look(rollout, old, sampling).breach
        assert bench.named() == cause.value, bench.folder.mismatch(bench.version, "txt").read_text()
        record = json.loads(bench.folder.mismatch(bench.version, "json").read_text())
        assert "sent again" in record["scores"][0]["finding"]


def test_weights_that_were_given_back_are_judged_by_what_a_complete_sync_mends(tmp_path: Path) -> None:
    run_ranks(1, weights_that_were_given_back, tmp_path)


def stops_on_a_breach(folder: Path) -> None:
    torch.set_num_threads(1)
    bench = Bench("llama", LAYOUTS[1], folder)
    bench.randomise(5)
    bench.sync()
    sampling = SamplingConfig(max_new_tokens=9)
    prompts, owners = bench.prompts(Random(2), 9, 20)
    with planted(one_tensor, bench, Random(3)) as fault:
        rollout = bench.generate(fault.engine, prompts, sampling)
        old = bench.score(rollout, owners, sampling)
        with pytest.raises(MismatchError, match=r"step 1: .* cause: weights: 1 of 21 tensors differ"):
            bench.look(rollout, old, sampling, on_breach="stop")
    assert bench.folder.mismatch(1, "txt").exists()
    _a_disk_that_is_full_costs_the_record_alone(bench, rollout, old, sampling)


def _a_disk_that_is_full_costs_the_record_alone(
    bench: Bench, rollout: Rollout, old: Ragged, sampling: SamplingConfig
) -> None:
    """By the other policy the run goes on, on all ranks; by this one it ends for the right reason."""
    older = replace(rollout, policy_versions=rollout.policy_versions.like(rollout.policy_versions.values - 1))
    text, said = bench.folder.mismatch(1, "txt"), list[str]()
    before = text.read_text() if bench.rank == 0 else ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.metrics.whole_file.os.fsync", _full)
        assert bench.look(older, old, sampling, note=said.append).breach
        with pytest.raises(
            MismatchError, match=rf"cause: weights: .* could not be written to {text} \(OSError: .*No space left"
        ):
            bench.look(older, old, sampling, on_breach="stop")
    assert ["could not be written" in one and "WEIGHTS" in one for one in said] == [True] * (bench.rank == 0)
    if bench.rank == 0:
        assert text.read_text() == before
        assert sorted(path.name for path in text.parent.iterdir()) == ["step_000001.json", "step_000001.txt"]


def _full(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def partly_and_wholly_older_tokens(folder: Path) -> None:
    """A response that was begun by an earlier version goes on: only its new tokens are compared."""
    torch.set_num_threads(1)
    bench = Bench("llama", LAYOUTS[2], folder)
    sampling = SamplingConfig(max_new_tokens=9)
    for seed in (5, 6):
        bench.randomise(seed)
        bench.sync()
    prompts, owners = bench.prompts(Random(2), 9, 20)
    rollout = bench.generate(bench.engine, prompts, sampling)
    old = bench.score(rollout, owners, sampling)
    begun = torch.arange(9).repeat(len(rollout)) < 4
    logprobs = rollout.rollout_logprobs.values.where(~begun, -9.0)
    versions = rollout.policy_versions.values.where(~begun, 1)
    older = replace(
        rollout,
        rollout_logprobs=rollout.rollout_logprobs.like(logprobs),
        policy_versions=rollout.policy_versions.like(versions),
    )
    found = bench.look(older, old, sampling, on_breach="stop")
    assert (found.breach, found.tokens, found.other_tokens) == (0.0, 9 * 5, 9 * 4)
    all_older = replace(older, policy_versions=rollout.policy_versions.like(torch.ones_like(versions)))
    with pytest.raises(MismatchError, match=r"cause: weights: 81 tokens were drawn, none by .* version 2: .* stale"):
        bench.look(all_older, old, sampling, on_breach="stop")
    assert bench.named() in (Cause.WEIGHTS.value, "")


def test_tokens_of_earlier_weights_are_no_mismatch_unless_there_are_no_others(tmp_path: Path) -> None:
    run_ranks(PAIR, partly_and_wholly_older_tokens, tmp_path)


def test_a_run_that_stops_does_so_on_every_rank_and_says_why(tmp_path: Path) -> None:
    run_ranks(PAIR, stops_on_a_breach, tmp_path)
