"""What a native engine gives back while it sleeps, and what it wants before it answers again."""

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.errors import EngineError
from rlhf.rollout.feed import Work
from tests.rollout.feeds import Scripted
from tests.rollout.tiny import fill, hf_model, hub_weights, make_engine, prompts

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=5)


def test_weights_are_given_back_and_only_a_whole_update_wakes_the_engine():
    model = hf_model("qwen2")
    engine, weights = make_engine(model), hub_weights(model)
    before = engine.generate(prompts(), GREEDY)
    sizes = sum(param.nbytes for param in engine.params().values())
    kept = dict(engine.params())
    assert engine.sleep() > 0
    assert engine.sleep(weights=True) == sizes  # keys and values went before
    assert engine.sleep(weights=True) == 0
    assert all(param.untyped_storage().nbytes() == 0 for param in engine.params().values())
    engine.wake_weights()
    engine.wake()
    with pytest.raises(EngineError, match="given back"):
        engine.generate(prompts(), GREEDY)
    most = {name: weight for name, weight in weights.items() if name != "model.norm.weight"}
    for one in engine.layout().holdings(0):
        if one.tensor in most:
            engine.params()[one.param][one.param_box(one.box).slices] = most[one.tensor][one.box.slices]
    with pytest.raises(EngineError, match=r"model\.norm\.weight has not come whole"):
        engine.weights_updated(2)
    fill(engine.params(), engine.layout(), 0, weights)
    engine.weights_updated(2)
    assert torch.equal(engine.collect().responses.values, before.responses.values)
    assert all(engine.params()[name] is param for name, param in kept.items())


def test_memory_is_not_given_back_while_rows_run():
    engine = make_engine(hf_model("qwen2"))

    def sleeps(feed: Scripted) -> bool:
        with pytest.raises(EngineError, match="rows are running"):
            engine.sleep()
        return feed.judged > 3

    engine.run(Scripted([Work(prompts())], stops=sleeps), SamplingConfig(max_new_tokens=50, ignore_eos=True))
    assert engine.sleep() > 0
