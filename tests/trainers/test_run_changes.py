"""What a resume refuses and what it tells: the record of the saved run against the one at hand."""

import json
import re
from dataclasses import replace

import pytest

from rlhf.config.load import load_config
from rlhf.config.run import PPORunConfig, SFTRunConfig
from rlhf.config.schema import keys_of
from rlhf.errors import CheckpointError
from rlhf.families.spec import ModelSpec
from rlhf.trainers.run_changes import FIXED, check_changes, check_frozen, same_ranks
from rlhf.trainers.run_record import RunRecord

SPEC = ModelSpec(
    family="llama",
    vocab_size=100,
    hidden_size=48,
    ffn_size=80,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_positions=64,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
)
CONFIG = """
name: one
trainer: ppo
num_steps: 10
actor: {model: {path: a}, optim: {lr: 1.0e-5}}
critic: {model: {path: a}}
reference: {model: {path: a}}
data: {source: jsonl, path: rows.jsonl}
reward: {function: "mine:score"}
"""


@pytest.fixture
def record(tmp_path):
    """A record of the small config above with some settings changed."""

    def make(
        *overrides: str, spec: ModelSpec = SPEC, content: str = "ab", tokenizer: str = "ef", world_size: int = 4
    ) -> RunRecord:
        (tmp_path / "run.yaml").write_text(CONFIG)
        config = load_config([str(tmp_path / "run.yaml"), *overrides])
        data = {"items": 1000, "content": content, "tokenizer": tokenizer}
        return RunRecord.of(config, world_size=world_size, data=data, models={"actor": spec, "critic": SPEC})

    return make


@pytest.fixture
def refused(record):
    """The message with which a run that has done 3 steps is not gone on with."""

    def message(*overrides: str, **changes: object) -> str:
        with pytest.raises(CheckpointError) as caught:
            check_changes(replace(record(), step=3), record(*overrides, **changes), where="here")
        return str(caught.value)

    return message


def test_a_record_survives_its_file_and_another_one_is_refused(record, tmp_path):
    saved = replace(record("actor.optim.lr=0.1"), step=3, state={"kl_coef": 0.1 / 3}, frozen={"reference": "0f"})
    (tmp_path / "driver.json").write_bytes(saved.to_json())
    assert RunRecord.read(tmp_path) == saved
    for change in ({"format": 0}, {"more": 1}):
        (tmp_path / "driver.json").write_text(json.dumps(json.loads(saved.to_json()) | change))
        with pytest.raises(CheckpointError, match=r"driver\.json: (of another version|holds)"):
            RunRecord.read(tmp_path)
    (tmp_path / "driver.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        RunRecord.read(tmp_path)


def test_the_same_run_is_gone_on_with_in_silence(record):
    assert check_changes(replace(record(), step=3), record(), where="here") == []
    assert same_ranks(record(), record())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=2", "seed: 2 now, 1 then; prompts, samples"),
        ("ppo.prompts_per_step=128", "ppo.prompts_per_step: 128 now, 64 then"),
        ("ppo.samples_per_prompt=2", "ppo.samples_per_prompt: 2 now, 1 then"),
        ("ppo.kl_coef=0.5", "the coefficient goes on from the saved one"),
        ("data.shuffle=false", "data.shuffle: False now, True then"),
        ("reward.function=mine:other", "reward.function: mine:other now"),
        ("eval.sampling.temperature=1", "eval.sampling.temperature: 1.0 now, 0.0 then"),
        ("actor.freeze=[model.norm.weight]", "actor.freeze: ['model.norm.weight'] now, nothing then"),
        ("critic.model.dtype=bfloat16", "critic.model.dtype: bfloat16 now"),
    ],
)
def test_what_makes_it_another_run_is_refused_by_name_with_the_reason(refused, override, words):
    found = refused(override)
    assert found.startswith("here: saved by a run that differs in what must stay")
    assert words in found
    assert len(found.splitlines()) == 2  # one cause, one line


def test_another_tokenizer_is_refused_and_not_taken_for_other_data(refused):
    found = refused(tokenizer="01")
    assert "actor.model.path: another tokenizer or chat template, so prompts are other tokens: hash 01 now" in found
    assert len(found.splitlines()) == 2


def test_all_differences_are_told_at_once(refused):
    found = refused("seed=2", "data.held_out=7", spec=replace(SPEC, hidden_size=64, tied_embeddings=False), content="x")
    assert [line.split(":")[0].strip() for line in found.splitlines()[1:]] == [
        *("seed", "data.held_out", "actor.model.path", "data.path"),
    ]
    assert "hidden_size 64 now, 48 then; tied_embeddings False now, True then" in found
    assert "with hash x now, 1,000 with ab then" in found


def test_a_resume_that_would_train_no_step_is_refused(record):
    with pytest.raises(CheckpointError, match="here: 10 steps are done and num_steps = 10, so that none is left"):
        check_changes(replace(record(), step=10), record(), where="here")
    assert check_changes(replace(record(), step=10), record("num_steps=11"), where="here") == [
        "changed: num_steps = 11, was 10"
    ]


def test_what_may_change_is_told(record):
    now = record(
        *("num_steps=20", "actor.optim.lr=1e-6", "actor.parallel.tp=2", "critic.parallel.first_rank=2", "name=two"),
        *("data.path=moved.jsonl", "log.console=plain", "checkpoint.every_steps=5", "eval.every_steps=2"),
        world_size=3,
    )
    assert check_changes(replace(record(), step=3), now, where="here") == [
        "changed: num_steps = 20, was 10",
        "changed: actor.optim.lr = 1e-06, was 1e-05",
        "changed: data.path = moved.jsonl, was rows.jsonl",
        "changed: eval.every_steps = 2, was 0",
        "layout of actor: tp2, was one rank",
        "layout of critic: one rank from rank 2, was one rank",
        "ranks: 3, were 4",
    ]
    assert not same_ranks(record(), record("critic.parallel.first_rank=2"))
    assert not same_ranks(record(), record(world_size=5))


def test_a_setting_that_the_saved_run_did_not_know_is_not_compared(record):
    then = replace(record(), step=3)
    older = dict(then.settings, ppo={key: value for key, value in then.settings["ppo"].items() if key != "kl_coef"})
    assert check_changes(replace(then, settings=older), record("ppo.kl_coef=0.7"), where="here") == []


def test_other_weights_of_a_role_that_no_checkpoint_holds_are_refused(record):
    then = replace(record(), frozen={"reference": "0a"})
    check_frozen(then, {"reference": "0a"}, where="here")
    check_frozen(record(), {"reference": "0a"}, where="here")  # saved without
    with pytest.raises(CheckpointError, match="the weights of reference have checksum 0b, and had 0a"):
        check_frozen(then, {"reference": "0b"}, where="here")


def test_each_rule_is_of_a_setting_that_there_is():
    paths = [key.path for cls in (PPORunConfig, SFTRunConfig) for key in keys_of(cls)]
    assert all(any(re.fullmatch(pattern, path) for path in paths) for pattern in FIXED)
