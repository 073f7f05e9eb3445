"""Reading settings: overrides, types, interpolation, and what each kind of mistake is told."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config.load import load_config, to_yaml
from rlhf.config.run import PPORunConfig, SFTRunConfig, check_world
from rlhf.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))
PPO = """
name: one
trainer: ppo
actor: {model: {path: a}}
critic: {model: {path: "${actor.model.path}"}}
reference: {model: {path: r}}
data: {source: jsonl, path: rows.jsonl}
reward: {function: "mine:score"}
"""


@pytest.fixture
def load(tmp_path):
    """Load the small PPO config above, or another text, with overrides."""

    def loader(*overrides: str, text: str = PPO):
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return load_config([str(file), *overrides])

    return loader


@pytest.fixture
def refused(load):
    """The message that an override, or another text, is refused with."""

    def message(*overrides: str, text: str = PPO) -> str:
        with pytest.raises(ConfigError) as caught:
            load(*overrides, text=text)
        return str(caught.value)

    return message


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: str(path.relative_to(REPO)))
def test_every_config_file_loads(file):
    assert isinstance(load_config([str(file)]), PPORunConfig | SFTRunConfig)


def test_quickstart_configs_cover_two_ranks():
    for part in ("sft", "ppo"):
        check_world(load_config([str(REPO / f"configs/quickstart/{part}.yaml")]), 2)


def test_defaults_fill_what_the_file_leaves_out(load):
    config = load()
    assert config.ppo.clip_eps == 0.2
    assert config.critic.model.path == "a"
    assert config.actor.parallel.layers_per_stage == ()


def test_a_section_given_in_part_keeps_the_defaults_of_its_place(load):
    # SamplingConfig's own default temperature is 1; that of evaluation is 0
    assert load("eval.sampling.max_new_tokens=7").eval.sampling.temperature == 0.0
    assert load(text=PPO + "eval: {sampling: {top_k: 3}}\n").eval.sampling.temperature == 0.0


def test_an_empty_section_keeps_its_defaults(load):
    assert load(text=PPO + "ppo:\n").ppo.epochs == 1


def test_overrides_replace_and_the_last_one_wins(load):
    config = load("ppo.epochs=2", "ppo.epochs=3", "data.task_options={a: [1, {b: 2}]}", "data.task_options.c=x")
    assert config.ppo.epochs == 3
    assert config.data.task_options == {"a": [1, {"b": 2}], "c": "x"}


def test_lists_become_tuples(load):
    assert load("rollout.sampling.stop_token_ids=[5, 7]").rollout.sampling.stop_token_ids == (5, 7)
    config = load("actor.parallel.pp=2", "actor.parallel.layers_per_stage=[3,1]")
    assert config.actor.parallel.layers_per_stage == (3, 1)


def test_a_reference_to_a_section_sees_defaults_and_overrides(load):
    config = load("critic.parallel=${actor.parallel}", "actor.parallel.tp=2", "critic.parallel.dp=3")
    assert (config.critic.parallel.tp, config.critic.parallel.dp, config.actor.parallel.dp) == (2, 3, 1)


@pytest.mark.parametrize("text", ["1e-3", "'1e-3'", "0.001", ".001", "1.0e-3"])
def test_numbers_may_be_written_in_any_way(load, text):
    assert load(f"actor.optim.lr={text}").actor.optim.lr == 1e-3


def test_a_whole_float_is_a_whole_number_and_a_whole_number_a_float(load):
    config = load("sync.bucket_bytes=1e8", "ppo.gamma=1")
    assert config.sync.bucket_bytes == 10**8
    assert isinstance(config.sync.bucket_bytes, int)
    assert isinstance(config.ppo.gamma, float)


def test_text_stays_text(load):
    assert load('name="2024"').name == "2024"
    assert load("data.system_prompt=").data.system_prompt == ""
    assert load("data.system_prompt='a: b = c'").data.system_prompt == "a: b = c"


def test_configs_are_frozen(load):
    with pytest.raises(FrozenInstanceError):
        load().seed = 2


def test_trainer_picks_the_kind_of_run(load):
    text = "name: s\ntrainer: sft\nactor: {model: {path: a}}\ndata: {source: jsonl, path: p}\n"
    assert isinstance(load(text=text), SFTRunConfig)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("ppo.clip_epss=0.1", ["ppo.clip_epss: unknown key", "ppo.clip_eps", "remove it"]),
        ("actor.optim.learning=1", ["actor.optim.learning: unknown key", "section actor.optim has lr, min_lr"]),
        ("actr.optim.lr=1", ["actr.optim.lr: unknown key", "nearest valid keys are actor.optim.lr"]),
        ("kl_coef=1", ["kl_coef: unknown key", "ppo.kl_coef"]),
        ("sft.batch_samples=2", ["sft.batch_samples: a key of another trainer"]),
        ("xyzzy=1", ["xyzzy: unknown key", "the top of the file has name, trainer"]),
        ("name=true", ["name: true given", "needs text", "'\"true\"'"]),
        ("name=12", ["name: 12 given", "needs text"]),
        ("log.wandb=1", ["log.wandb: 1 given", "needs true or false"]),
        ("log.wandb='true'", ["log.wandb: 'true' given", "needs true or false"]),
        ("num_steps=true", ["num_steps: true given", "needs a whole number"]),
        ("num_steps=1.5", ["num_steps: 1.5 given", "needs a whole number"]),
        ("num_steps=null", ["num_steps: null given", "remove the key"]),
        ("actor.optim.lr=fast", ["actor.optim.lr: 'fast' given", "needs a finite number"]),
        ("actor.optim.lr=.nan", ["actor.optim.lr: nan given", "needs a finite number"]),
        ("actor.parallel.layers_per_stage=3", ["actor.parallel.layers_per_stage: 3 given", "needs a list of whole"]),
        ("actor.parallel.layers_per_stage=[1,x]", ["actor.parallel.layers_per_stage[1]: 'x' given"]),
        ("data.task_options=3", ["data.task_options: 3 given", "needs a mapping"]),
        ("data.task_options={1: 2}", ["data.task_options: key 1 given", "quote it"]),
        ("reference.model=3", ["reference.model: 3 given", "section with keys path, init"]),
        ("reference.model=[3]", ["reference.model: [3] given", "section with keys path, init"]),
        ("trainer=dpo", ["trainer: 'dpo' given", "ppo or sft"]),
        ("job.device=${nope}", ["job.device: Interpolation key 'nope' not found"]),
        ("foo", ["foo: not an override", "KEY=VALUE"]),
        ("--seed=1", ["--seed=1: not an override"]),
        ("ppo..epochs=1", ["ppo..epochs=1: not an override"]),
        ("ppo.epochs=[1", ["ppo.epochs: '[1' is not YAML"]),
        ("sync.verify=off", ["sync.verify", "YAML reads off, no and false so", "all, sample, none"]),
        ("sync.fanout=yes", ["sync.fanout", "YAML reads on, yes and true so", "direct, node"]),
    ],
)
def test_a_mistake_is_named_with_its_place_and_cure(refused, override, parts):
    message = refused(override)
    for part in parts:
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["actor.optim.lr=0"], "actor.optim.lr: 0.0 given"),
        (["critic.optim.overlap_param_gather=true"], "critic.optim.overlap_param_gather: true, but without critic.opt"),
        (["critic.optim.min_lr=1"], "critic.optim.min_lr: 1.0 is above critic.optim.lr = 1e-06"),
        (["reference.parallel.vpp=2"], "reference.parallel.vpp: 2 chunks on a single pipeline stage given; needs"),
        (
            ["actor.parallel.pp=2", "actor.parallel.vpp=2", "actor.parallel.layers_per_stage=[1,2]"],
            "actor.parallel.layers_per_stage: [1, 2] given; needs pp*vpp = 4 counts of at least 1",
        ),
        (
            ["actor.parallel.tp=2", "actor.parallel.dp=3", "actor.parallel.ep=4"],
            "actor.parallel.ep: ep*etp = 4*1 = 4 given; needs a divisor of tp*dp = 2*3 = 6",
        ),
        (["reference.parallel.pp=0"], "reference.parallel.pp: 0 given; needs at least 1; set reference.parallel.pp=1"),
        (["critic.microbatch_tokens=0"], "critic.microbatch_tokens: 0 given; needs at least 1; set critic.microbatch_"),
        (["eval.sampling.top_p=2"], "eval.sampling.top_p: 2.0 given"),
        (["reference.model.path="], "reference.model.path: empty"),
        (["rollout.kv_cache_tokens=8"], "rollout.kv_cache_tokens: 8 cannot hold one response of rollout.sampling.max"),
        (["rollout.kv_cache_tokens=500"], "rollout.kv_cache_tokens: 500 is less than data.max_prompt_tokens"),
        (
            ["rollout.sampling.ignore_eos=true", "rollout.sampling.stop_token_ids=[5]"],
            "rollout.sampling.stop_token_ids: (5,) given, but ignore_eos",
        ),
        (["eval.sampling.max_new_tokens=65000"], "rollout.kv_cache_tokens: 65536 is less than"),
        (
            ["eval.sampling.temperature=1e-38"],
            "eval.sampling.temperature: 1e-38 given; needs 0 (the most likely token) or",
        ),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature: 0 samples the same"),
        (["ppo.minibatch_samples=7"], "ppo.minibatch_samples: 7 does not divide"),
        (["ppo.kl_controller.kind=pid"], "ppo.kl_controller.kind: 'pid' given; needs one of fixed, adaptive"),
        (["ppo.kl_controller.kind=adaptive", "ppo.kl_coef=0"], "ppo.kl_coef: 0.0 given; needs more than 0.0"),
        (
            ["ppo.kl_controller.kind=adaptive", "ppo.kl_controller.horizon=63"],
            "ppo.kl_controller.horizon: 63 is less than prompts_per_step * samples_per_prompt = 64",
        ),
        (["ppo.shaping.normalize=group"], "ppo.shaping.normalize: group with samples_per_prompt = 1"),
        (["ppo.shaping.clip=[3]"], "ppo.shaping.clip: [3.0] given; needs the least and the greatest"),
        (["ppo.shaping.clip=[3,-3]"], "ppo.shaping.clip: [3.0, -3.0] given"),
        (
            ["ppo.shaping.truncated=mask", "rollout.sampling.ignore_eos=true"],
            "ppo.shaping.truncated: mask leaves no response over",
        ),
        (["ppo.length_penalty.cache_tokens=5"], "ppo.length_penalty.cache_tokens: 5 is more than max_tokens = 0"),
        (
            ["ppo.length_penalty={min_tokens: 9, max_tokens: 10, cache_tokens: 2}"],
            "ppo.length_penalty.min_tokens: 9 is more than max_tokens - cache_tokens = 10 - 2",
        ),
        (["ppo.length_penalty.min_tokens=257"], "ppo.length_penalty.min_tokens: 257 is more than rollout.sampling.max"),
        (["ppo.length_penalty.max_tokens=256"], "ppo.length_penalty.max_tokens: with cache_tokens = 0 the penalty"),
        (["ppo.value_loss.clip_eps=0"], "ppo.value_loss.clip_eps: 0.0 given; needs more than 0.0"),
        (["eval.samples_per_prompt=4"], "eval.samples_per_prompt: 4 given, but eval.sampling.temperature = 0"),
        (["eval.pass_k=2"], "eval.pass_k: 2 given; needs 1 to 1"),
        (["ppo.critic_warmup_steps=100"], "ppo.critic_warmup_steps: 100 of num_steps = 100"),
        (["eval.every_steps=5", "data.held_out=0"], "eval.every_steps: 5 given"),
        (["reward.timeout_s=1000"], "reward.timeout_s: 1000.0 is not less than job.progress_limit_s"),
        (
            ["reward.function=rlhf.reward.gym:score"],
            "reward.function: rlhf.reward.gym:score scores reasoning_gym",
        ),
        (["profile.steps=[3,101]"], "profile.steps: 101 given, but num_steps = 100"),
        (["log.samples_every_steps=-1"], "log.samples_every_steps: -1 given; needs at least 0"),
        (["profile.steps=[0]"], "profile.steps: 0 given; needs at least 1"),
        (["profile.torch=true"], "profile.torch: true given, but profile.steps = []"),
        (["name=a/b"], "name: 'a/b' given"),
        (["name=.hidden"], "name: '.hidden' given"),
    ],
)
def test_a_rule_speaks_of_the_full_path(refused, overrides, start):
    assert refused(*overrides).startswith(start)


def test_a_missing_key_is_told_with_its_docstring(refused):
    message = refused(text=PPO.replace("actor: {model: {path: a}}", ""))
    assert message.startswith("actor.model.path: missing; needs text: Hugging Face checkpoint folder")
    assert message.endswith("Set actor.model.path=TEXT")
    assert "critic" not in message  # it only refers to the missing one


def test_several_mistakes_are_told_at_once(refused):
    message = refused("ppo.clip_eps=0", "num_steps=x", "lr=1", "data.source=csv")
    assert "4 settings cannot work" in message
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
        "lr",
        "num_steps",
        "data.source",
        "ppo.clip_eps",
    ]


def test_rules_of_the_whole_run_are_told_beside_those_of_its_parts(refused):
    message = refused("data.held_out=0", "eval.every_steps=5", "critic.optim.min_lr=1", "foo", "reference.model=3")
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
        "foo",
        "critic.optim.min_lr",
        "reference.model",
        "eval.every_steps",
    ]


def test_what_follows_from_a_mistake_is_not_told_as_another(refused):
    # critic.model.path refers to the missing actor.model.path; gamma's stand-in breaks no rule
    message = refused("ppo.gamma=x", "num_steps=x", "ppo.critic_warmup_steps=100", "name=")
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == ["num_steps", "ppo.gamma", "name"]


def test_all_malformed_overrides_are_told_at_once(refused):
    message = refused("foo", "bar")
    assert "foo: not an override" in message
    assert "bar: not an override" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- 1\n", "holds a list"),
        ("a: [1\nb: 2\n", "needs YAML"),
        ("name: a\nname: b\n", "duplicate key"),
        ("", "trainer: missing"),
        ("name: ${x\n", "needs YAML"),
    ],
)
def test_a_broken_file_is_refused(refused, text, part):
    assert part in refused(text=text)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config([str(tmp_path / "none.yaml")])
    with pytest.raises(ConfigError, match="no config file"):
        load_config([])
    with pytest.raises(ConfigError, match="comes first"):
        load_config(["ppo.epochs=1"])


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: str(path.relative_to(REPO)))
def test_what_ran_can_be_loaded_again(file, tmp_path):
    config = load_config([str(file)])
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(config))
    assert load_config([str(again)]) == config


@settings(deadline=None, max_examples=30)
@given(text=st.text(alphabet="a$${}\\\\.: '\"\n#1e-true~é", max_size=12), number=st.floats(1e-30, 1e30))
def test_any_text_and_number_survive_the_yaml(tmp_path_factory, text, number):
    file = tmp_path_factory.mktemp("yaml") / "run.yaml"
    file.write_text(PPO)
    config = load_config([str(file)])
    object.__setattr__(config.data, "system_prompt", text)
    object.__setattr__(config.data, "task_options", {"k": [text]})
    object.__setattr__(config.actor.optim, "lr", number)
    file.write_text(to_yaml(config))
    assert load_config([str(file)]) == config


def test_help_leaves_with_code_0(capsys):
    with pytest.raises(SystemExit) as left:
        load_config(["--help"])
    assert left.value.code == 0
    assert "usage:" in capsys.readouterr().out
