"""The watch over SGLang's engine itself: clean answers are left alone, faults in its own processes are named."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.sglang.engine import SGLangEngine
from rlhf.trainers.mismatch.verdict import Cause
from tests.harness.ranks import run_ranks
from tests.rollout.sglang.tiny import needs_sglang
from tests.trainers.mismatch import bench as bench_module
from tests.trainers.mismatch.bench import Bench, Layout, shifted
from tests.trainers.mismatch.faults import Changed, boundaries_wrong, planted

pytestmark = [pytest.mark.dist, *needs_sglang]
UNPADDED = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Sizes that SGLang leaves as they are on a CPU."""


@dataclass(frozen=True)
class ScaleOne:
    """An errand: a parameter of the scheduler's model is no longer what was sent."""

    name: str

    def run(self, model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(dict(model.named_parameters())[self.name].mul_(1.3).sum())


@dataclass(frozen=True)
class OtherEpsilon:
    """An errand: the norms of the scheduler's model compute otherwise, with the weights they were sent."""

    factor: float

    def run(self, model: torch.nn.Module) -> int:
        norms = [m for name, m in model.named_modules() if hasattr(m, "variance_epsilon") and "layers" in name]
        for norm in norms:
            norm.variance_epsilon *= self.factor
        return len(norms)


def looked_at(bench: Bench, sampling: SamplingConfig, *, engine: RolloutEngine | None = None) -> str:
    """The cause that is named for a step; empty: none."""
    draw = Random(f"{bench.version}")
    prompts, owners = bench.prompts(draw, 8, 20)
    rollout = bench.generate(engine or bench.engine, prompts, sampling)
    found = bench.look(rollout, bench.score(rollout, owners, sampling), sampling, engine=engine)
    assert found.tokens == 8 * sampling.max_new_tokens
    return bench.named() if found.breach else ""


def watches_sglang(folder: Path) -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:  # the process is kept for other tests, which go through all families
        patch.setitem(bench_module.FAMILIES, "unpadded", {**bench_module.FAMILIES["qwen3"], **UNPADDED})
        bench = Bench("unpadded", Layout(engine="sglang"), folder)
    engine = bench.engine
    assert isinstance(engine, SGLangEngine)
    plain = SamplingConfig(max_new_tokens=9)
    try:
        for number, sampling in enumerate(
            (plain, replace(plain, temperature=0.0), replace(plain, temperature=0.6, top_p=0.9, top_k=20))
        ):
            bench.randomise(number)
            bench.sync()
            assert looked_at(bench, sampling) == ""

        assert engine.ask_schedulers(ScaleOne("model.layers.1.self_attn.qkv_proj.weight"))
        assert looked_at(bench, plain) == Cause.WEIGHTS.value
        record = json.loads(bench.folder.mismatch(bench.version, "json").read_text())
        assert record["finding"].startswith("3 of "), record["finding"]
        assert "model.layers.1.self_attn.k_proj.weight" in record["finding"]
        assert looked_at(bench, plain) == ""  # the triage has sent the weights again

        for cause, changed in (
            (Cause.SAMPLING, Changed(engine, ask=lambda s: replace(s, temperature=0.7))),
            (
                Cause.SHIFT,
                Changed(engine, answer=lambda r: replace(r, rollout_logprobs=shifted(r.rollout_logprobs, 1))),
            ),
        ):
            bench.sync()
            assert looked_at(bench, plain, engine=changed) == cause.value
        bench.sync()
        with planted(boundaries_wrong, bench, Random(3)):
            assert looked_at(bench, plain) == Cause.PACKING.value
        bench.sync()
        assert engine.ask_schedulers(OtherEpsilon(300.0))[0] >= 2 * 2
        assert looked_at(bench, plain) == Cause.KERNELS.value
        assert engine.ask_schedulers(OtherEpsilon(1 / 300.0))
        bench.sync()
        assert looked_at(bench, plain) == ""
    finally:
        engine.close()


def test_faults_inside_sglang_and_around_it_are_named(tmp_path: Path) -> None:
    run_ranks(1, watches_sglang, tmp_path)
