"""A run that freezes some of the actor's and the critic's weights: they stay, and no sync but the first sends them."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from rlhf.build.loops import build_loop
from rlhf.dist.groups import GroupFactory
from rlhf.families.frozen import changing_tensors
from rlhf.families.registry import logical_tensors
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.params import local_params
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.ppo import PPOLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here

OF_ACTOR, OF_CRITIC = ("model.embed_tokens.weight", "model.layers.0.*"), ("model.layers.[12].mlp.*",)


def _weights(model: MegatronModel) -> dict[str, torch.Tensor]:
    """By logical name, of a model that one rank holds."""
    params = local_params(model)
    layout = megatron_layout(model.spec, model.parallel, head=model.head, dtype="float32")
    blocks: dict[str, list[torch.Tensor]] = {}
    for piece in layout.holdings(0):
        blocks.setdefault(piece.tensor, []).append(params[piece.param][piece.param_box(piece.box).slices].clone())
    return {name: torch.cat(found) for name, found in blocks.items()}


def _changed(model: MegatronModel, before: dict[str, torch.Tensor]) -> set[str]:
    after = _weights(model)
    return {name for name, weight in before.items() if not torch.equal(weight, after[name])}


def _check_run(folder: Path) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    patterns = (f"{role}.freeze={json.dumps(names)}" for role, names in (("actor", OF_ACTOR), ("critic", OF_CRITIC)))
    config = load(folder, *patterns)
    loop = build_loop(config, ranks_here(folder / "runs" / config.name, groups))
    assert isinstance(loop, PPOLoop)
    models = [(role.model, names) for role, names in ((loop.models.actor, OF_ACTOR), (loop.models.critic, OF_CRITIC))]
    before = [_weights(model) for model, _ in models]
    state, sent = DriverState.start(config), []
    with loop.reporter, loop.sample_dump:
        for _ in range(3):
            state, experience, part = loop.step(state)
            sent.append(part.sync.num_tensors)
            ours, theirs = experience.old_logprobs.values, experience.scored.rollout.rollout_logprobs.values
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    for (model, names), start in zip(models, before, strict=True):
        changing = changing_tensors(model.spec, names, head=model.head, where="freeze")
        assert changing < {tensor.name for tensor in logical_tensors(model.spec, head=model.head)} == start.keys()
        assert _changed(model, start) == changing
    actor = models[0][0]
    trained = len(changing_tensors(actor.spec, OF_ACTOR, head=actor.head, where="freeze"))
    assert sent == [len(before[0]), trained, trained]


@pytest.mark.dist
def test_frozen_weights_stay_and_only_the_first_sync_sends_them(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(1, _check_run, tmp_path)
