"""Specs against transformers' own config classes and model classes."""

import json

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.errors import CheckpointError
from rlhf.families.registry import hf_config, logical_tensors, read_spec, spec_of
from rlhf.families.spec import Head, ModelSpec, RopeScaling

TINY = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 640,
    "rms_norm_eps": 3e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 7.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 80,
}


EXPERTS = {
    "qwen3_moe": {"num_experts": 5, "experts_per_token": 3, "moe_ffn_size": 36, "norm_topk_prob": True},
    "mixtral": {"num_experts": 5, "experts_per_token": 3, "moe_ffn_size": 52, "norm_topk_prob": True},
}
MOE = {**TINY, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 3}
MOE |= {"moe_intermediate_size": 36}
FAMILY_NAMES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]


def spec(family: str, *, tied: bool = False, scaled: bool = False) -> ModelSpec:
    return ModelSpec(
        family=family,
        vocab_size=101,
        hidden_size=24,
        ffn_size=52,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        norm_eps=3e-5,
        rope_theta=7321.0,
        rope_scaling=RopeScaling(factor=7.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_positions=80)
        if scaled
        else None,
        max_positions=640,
        tied_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        init_std=0.03,
        **EXPERTS.get(family, {}),
    )


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_config_survives_transformers(family, tied, scaled, tmp_path):
    ours = spec(family, tied=tied, scaled=scaled)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(ours)))
    assert read_spec(tmp_path) == ours
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    assert read_spec(tmp_path / "again") == ours


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", list(Head))
def test_tensors_are_those_that_transformers_saves(family, tied, head, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec(family, tied=tied), head=head)))
    kind = AutoModelForCausalLM if head is Head.LM else AutoModelForSequenceClassification
    model = kind.from_config(AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)  # a tied head appears once
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 # not a dict
    tensors = logical_tensors(spec(family, tied=tied), head=head)
    assert {t.name: t.shape for t in tensors} == theirs
    assert len({t.name for t in tensors}) == len(tensors)


def test_experts_are_listed_last_in_their_layer_and_say_where_they_belong():
    tensors = [t for t in logical_tensors(spec("mixtral"), head=Head.LM) if t.layer == 1]
    assert [(t.part.value, t.expert) for t in tensors[-16:]] == [
        ("router", -1),
        *((part, expert) for expert in (0, 1, 2, 3, 4) for part in ("expert_gate", "expert_up", "expert_down")),
    ]
    assert tensors[-1].name == "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    assert tensors[-1].shape == (24, 52)


def test_the_number_of_experts_has_two_spellings():
    ours = spec_of(MOE, where="c")
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in MOE.items()}
    assert spec_of(renamed, where="c") == ours
    assert (ours.num_experts, ours.experts_per_token, ours.moe_ffn_size, ours.norm_topk_prob) == (5, 3, 36, False)


def test_rotary_keys_of_transformers_4_and_5_mean_the_same():
    base = {**TINY, "architectures": ["LlamaForCausalLM"]}
    old = spec_of({**base, "rope_theta": 5e5, "rope_scaling": LLAMA3}, where="c")
    new = spec_of({**base, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, where="c")
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == spec("llama", scaled=True).rope_scaling
    without = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    both = {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    assert spec_of({**base, "rope_theta": 5e5, **both}, where="c") == old
    whole = spec_of({**base, "rope_theta": 5e5, "rope_scaling": without}, where="c")
    assert whole.rope_scaling.original_max_positions == TINY["max_position_embeddings"]
    older = spec_of({**base, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}, where="c")
    assert older == old


def test_keys_left_out_get_the_familys_defaults():
    bare = {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")}
    llama = spec_of({**bare, "model_type": "llama"}, where="c")
    assert (llama.head_dim, llama.num_kv_heads, llama.rope_theta, llama.tied_embeddings) == (4, 6, 10000.0, False)
    assert spec_of({**bare, "model_type": "qwen3"}, where="c").head_dim == 128
    assert spec_of({**bare, "model_type": "qwen2"}, where="c").qkv_bias


@pytest.mark.parametrize(
    ("entries", "window", "longest"),
    [({}, 4096, 4096), ({"sliding_window": None}, 0, 32768), ({"sliding_window": 65536}, 65536, 32768)],
)
def test_a_mistral_config_means_the_window_that_transformers_reads_from_it(entries, window, longest, tmp_path):
    config = {**TINY, "architectures": ["MistralForCausalLM"], "model_type": "mistral", **entries}
    config["max_position_embeddings"] = 32768
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = read_spec(tmp_path)
    assert (ours.sliding_window, ours.max_length) == (window, longest)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (theirs.sliding_window or 0) == window
    theirs.save_pretrained(tmp_path / "again")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(hf_config(ours)))
    assert read_spec(tmp_path / "again") == read_spec(tmp_path / "ours") == ours


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": {**LLAMA3, "factor": 2.0}},
            "rope_parameters is .* rope_scaling is .* needs one, or the same",
        ),
        ({"rope_parameters": LLAMA3, "rope_scaling": "x"}, "rope settings 'x'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 25, "head_dim": None}, "hidden_size = 25"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"head_dim": 7}, "head_dim = 7; needs an even number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_parameters": {**LLAMA3, "factor": -2.0}}, "factor is -2.0"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 5.0}}, "low_freq_factor = 5.0, high_freq_factor = 5.0"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changed, named):
    with pytest.raises(CheckpointError, match=named):
        spec_of({**TINY, "architectures": ["LlamaForCausalLM"], **changed}, where="config.json")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_local_experts": 4}, "num_experts = 5, num_local_experts = 4"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 of num_experts = 5"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2; needs 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 4096}, "sliding_window = 4096"),
        ({"architectures": ["MixtralForCausalLM"], "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    ],
)
def test_experts_that_cannot_be_run_are_refused_by_name(changed, named):
    with pytest.raises(CheckpointError, match=named):
        spec_of({**MOE, **changed}, where="config.json")


def test_unreadable_config_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_spec(tmp_path)
