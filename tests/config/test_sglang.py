"""Which options of SGLang's engines are taken, and which are refused by name."""

import pytest

from rlhf.config.rollout import RolloutConfig
from rlhf.config.sglang import SGLangConfig
from rlhf.errors import ConfigError


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("quantization=fp8", "options of quant repack or quantise weights"),
        ("moe_runner_backend=flashinfer_trtllm", "options of trtllm repack"),
        ("fp8_gemm_runner_backend=auto", "options of fp8 repack"),
        ("enable_aiter_allreduce_fusion=true", "options of aiter repack"),
        ("torchao_config=int4wo-128", "options of torchao repack"),
        ("cpu_offload_gb=4", "options of offload repack"),
        ("tp_size=4", r"tp_size has a setting of its own here; set rollout\.tp"),
        ("chunked_prefill_size=4096", r"has a setting of its own here; set rollout\.sglang\.chunked_prefill_size"),
        ("disable_radix_cache=true", r"set rollout\.sglang\.radix_cache"),
        ("load_format=auto", "load_format is not free"),
        ("speculative_algorithm=EAGLE", "speculative decoding is not for training: a sync brings"),
        ("enable_lora=true", "enable_lora is not free"),
        ("page_size", "needs NAME=VALUE"),
        ("page_size=", "has no value"),
        ("page_size=[1", "is no YAML"),
        ("json_model_override_args={num_hidden_layers: 1}", "json_model_override_args is not free"),
        ("preferred_sampling_params={top_k: 3}", "preferred_sampling_params is not free"),
        ("tokenizer_worker_num=2", "tokenizer_worker_num is not free"),
        ("attn_dp_size=2", "attn_dp_size is not free"),
        ("dcp_size=2", "dcp_size is not free"),
        ("ep_num_redundant_experts=2", "ep_num_redundant_experts is not free"),
        ("enable_watermark=true", "enable_watermark is not free"),
    ],
)
def test_options_that_would_break_a_sync_or_are_the_engines_own_are_refused_by_name(args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SGLangConfig(extra_args=(args,))


def test_attention_on_amx_is_refused_and_other_options_are_taken() -> None:
    with pytest.raises(ConfigError, match="options of amx repack"):
        SGLangConfig(attention_backend="intel_amx")
    assert SGLangConfig(attention_backend="fa3", extra_args=("page_size=16", "disable_overlap_schedule=true"))


def test_an_argument_is_given_once() -> None:
    with pytest.raises(ConfigError, match="page_size given 2 times; needs one value"):
        SGLangConfig(extra_args=("page_size=16", "enable_metrics=true", "page_size=32"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, "options of quant repack or quantise weights, which a sync would not undo"),
        ({"speculative_algorithm": "EAGLE"}, "a draft model would guess by old ones"),
        ({"schedule_policy": "fifo"}, "needs one of fcfs, lpm"),
        ({"sampling_backend": "torch"}, "needs one of by_seed, pytorch, flashinfer"),
        ({"kv_cache_dtype": "int8"}, "needs one of auto, bfloat16, fp8_e4m3"),
        ({"log_level": "verbose"}, "needs one of debug, info"),
        ({"mem_fraction_static": 1.5}, "needs 0.0 to 0.95"),
        ({"chunked_prefill_size": -2}, "needs at least -1"),
        ({"deterministic": True, "decode_attention_backend": "flashmla"}, "needs one of auto, fa3"),
        ({"deterministic": True, "sampling_backend": "flashinfer"}, "it draws by no seeds"),
    ],
)
def test_typed_options_are_refused_by_name_with_what_is_needed(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SGLangConfig(**options)


def test_experts_are_shared_out_among_the_ranks_of_an_engine() -> None:
    assert RolloutConfig(engine="sglang", tp=4, sglang=SGLangConfig(ep=2))
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.ep: 3 given, but rollout\.tp = 4"):
        RolloutConfig(engine="sglang", tp=4, sglang=SGLangConfig(ep=3))


def test_an_engine_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs native, sglang or package\.module:factory"):
        RolloutConfig(engine="vllm")
