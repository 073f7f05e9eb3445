"""How SGLang's engines are started."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import yaml

from rlhf.config.checks import at_least, between, more_than, one_of, refuse

BY_SEED = "by_seed"
SAMPLING_BACKENDS = (BY_SEED, "pytorch", "flashinfer")
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")
INVARIANT_ATTENTION = ("auto", "fa3", "fa4", "flashinfer", "triton")
"""Attention kernels that SGLang admits for deterministic inference."""

_HERE = {
    "mem_fraction_static": "rollout.sglang.mem_fraction_static",
    "chunked_prefill_size": "rollout.sglang.chunked_prefill_size",
    "schedule_policy": "rollout.sglang.schedule_policy",
    "disable_radix_cache": "rollout.sglang.radix_cache",
    "attention_backend": "rollout.sglang.attention_backend",
    "prefill_attention_backend": "rollout.sglang.prefill_attention_backend",
    "decode_attention_backend": "rollout.sglang.decode_attention_backend",
    "sampling_backend": "rollout.sglang.sampling_backend",
    "kv_cache_dtype": "rollout.sglang.kv_cache_dtype",
    "disable_cuda_graph": "rollout.sglang.cuda_graph",
    "cuda_graph_max_bs_decode": "rollout.sglang.cuda_graph_max_batch",
    "enable_deterministic_inference": "rollout.sglang.deterministic",
    "log_level": "rollout.sglang.log_level",
    "watchdog_timeout": "rollout.sglang.reply_limit_s",
    "tp_size": "rollout.tp",
    "ep_size": "rollout.sglang.ep",
    "max_running_requests": "rollout.max_running",
    "max_total_tokens": "rollout.kv_cache_tokens",
    "random_seed": "seed",
}
"""Server arguments that settings of ours stand for."""

_SET_BY_US = re.compile(
    r"model_path|tokenizer_path|skip_tokenizer_init|load_format|custom_weight_loader|device|dtype|dp_size|pp_size|"
    r"nnodes|node_rank|dist_init_addr|base_gpu_id|gpu_id_step|context_length|enable_memory_saver|weight_version|"
    r"enable_dp_attention|rl_on_policy_target|disaggregation_.*|weight_cache_.*|startup_weight_load_mode|.*lora.*|"
    # another model, or other processes
    r"json_model_override_args|model_impl|model_config_parser|is_embedding|encoder_only|language_(model_)?only|dllm_.*|"
    r"tokenizer_worker_num|detokenizer_worker_num|use_ray|custom_sigquit_handler|gated_launch_port|"
    # other cuts of the weights
    r"(attn|moe)_dp_size|attn_cp_size|d(c|wd)p_size|moe_dense_tp_size|shared_experts_tp_size|enable_dp_lm_head|"
    r"enable_eplb|eplb_.*|ep_num_redundant_experts|init_expert_location|enable_elastic_expert_backup|elastic_ep_.*|"
    # other answers
    r"preferred_sampling_params|sampling_defaults|incremental_streaming_output|allow_auto_truncate|max_queued_requests|"
    r"(enable_)?watermark.*|grammar_backend|prefill_only_disable_kv_cache"
)
"""Server arguments that the engine sets itself, or that a training rollout cannot do with."""

_REPACKS = re.compile(
    r"quant|fp8|fp4|int8|int4|w4a|awq|gptq|torchao|marlin|modelopt|aiter|trtllm|amx|interleave|cutlass|cutedsl|"
    r"deep_?gemm|humming|flash_rl|offload|kt_",
    re.IGNORECASE,
)
"""Names and values of options after which an engine's weights are no longer laid out as a sync writes them."""

_NO_SPECULATION = (
    "a sync brings the policy's weights alone, so a draft model would guess by old ones ever worse (and by none after "
    "weights were released); what is guessed right is drawn by other random numbers than a sample's own, without "
    "min-p, and on CPUs as if the temperature were 0"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangConfig:
    """What `rollout.engine=sglang` has beyond the settings of every engine."""

    python: str = ""
    """Interpreter that engines run in, such as .venv-sglang/bin/python; empty takes the job's own."""
    ep: int = 1
    """Ranks of an engine that share out its experts; the others of its tp ranks cut them."""
    mem_fraction_static: float = 0.6
    """Share of a GPU's memory for an engine's weights, keys and values while it is awake."""
    chunked_prefill_size: int = 0
    """Most prompt tokens in one forward pass; longer prompts go in pieces. 0 leaves it to SGLang, -1 never cuts one."""
    schedule_policy: str = "fcfs"
    """Which waiting request is begun next: fcfs (the first that came), lpm (the longest prefix in the cache),
    dfs-weight, lof (the longest response first) or random."""
    radix_cache: bool = True
    """Keep keys and values of finished prompts, for requests that begin alike; those of a step's samples do."""
    attention_backend: str = "auto"
    """Attention kernels; auto takes torch's own on CPUs and leaves it to SGLang on GPUs."""
    prefill_attention_backend: str = "auto"
    """Of prompts alone; auto takes attention_backend."""
    decode_attention_backend: str = "auto"
    """Of new tokens alone; auto takes attention_backend."""
    sampling_backend: str = BY_SEED
    """by_seed draws each token by its sample's seed, as the native engine does; with pytorch and flashinfer (GPUs)
    SGLang draws, and a sample's tokens depend on its batch unless `deterministic` is set."""
    kv_cache_dtype: str = "auto"
    """Of keys and values: auto (the model's), bfloat16, or fp8_e4m3 or fp8_e5m2 on GPUs, half the memory at the price
    of log-probs further from the trainer's. Weights are as the model has them in any case."""
    quantization: str = "none"
    """Only none: quantised weights are packed in ways that a weight sync does not write."""
    speculative_algorithm: str = "none"
    """Only none: a sync would leave a draft model behind, and a sample's tokens would not be those of its seed."""
    cuda_graph: bool = True
    """Decode through CUDA graphs, on GPUs."""
    cuda_graph_max_batch: int = 0
    """Largest batch that a CUDA graph is recorded for; 0 leaves it to SGLang."""
    deterministic: bool = False
    """Kernels whose results on a row do not depend on the batch, to the last bit; slower. On GPUs; on CPUs SGLang has
    none, and samples are drawn by seed all the same."""
    extra_args: tuple[str, ...] = ()
    """More of SGLang's server arguments as NAME=VALUE, such as page_size=16; VALUE is read as YAML."""
    start_limit_s: float = 600.0
    """An engine that is not ready after so many seconds ends the job."""
    reply_limit_s: float = 300.0
    """An engine that says nothing for so many seconds while it is at work ends the job."""
    log_level: str = "warning"
    """Of the engines' logs, logs/engine_R.log."""

    def __post_init__(self) -> None:
        at_least("sglang.ep", self.ep, 1)
        if more_than("sglang.mem_fraction_static", self.mem_fraction_static, 0.0):
            between("sglang.mem_fraction_static", self.mem_fraction_static, 0.0, 0.95)
        at_least("sglang.chunked_prefill_size", self.chunked_prefill_size, -1)
        at_least("sglang.cuda_graph_max_batch", self.cuda_graph_max_batch, 0)
        more_than("sglang.start_limit_s", self.start_limit_s, 0.0)
        more_than("sglang.reply_limit_s", self.reply_limit_s, 0.0)
        one_of("sglang.schedule_policy", self.schedule_policy, SCHEDULE_POLICIES)
        one_of("sglang.sampling_backend", self.sampling_backend, SAMPLING_BACKENDS)
        one_of("sglang.kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        one_of("sglang.log_level", self.log_level, ("debug", "info", "warning", "error"))
        if self.quantization != "none":
            refuse_repacking("sglang.quantization", "quantization", self.quantization)
        if self.speculative_algorithm != "none":
            _refuse_speculation("sglang.speculative_algorithm", self.speculative_algorithm)
        self._check_attention()
        for text in self.extra_args:
            self._check_extra(text)
        for name, count in Counter(map(argument_name, self.extra_args)).items():
            if count > 1:
                refuse(f"sglang.extra_args: {name} given {count} times; needs one value; remove the others")

    def _check_attention(self) -> None:
        for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
            value = getattr(self, name)
            refuse_repacking(f"sglang.{name}", name, value)
            if self.deterministic and value not in (*INVARIANT_ATTENTION, "torch_native"):
                refuse(
                    f"sglang.{name}: {value} given with sglang.deterministic; needs one of "
                    f"{', '.join(INVARIANT_ATTENTION)}; change one of them"
                )
        if self.deterministic and self.sampling_backend == "flashinfer":
            refuse(
                "sglang.sampling_backend: flashinfer given with sglang.deterministic, but it draws by no seeds; needs "
                f"{BY_SEED} or pytorch; change one of them"
            )

    def _check_extra(self, text: str) -> None:
        name, equals, value = text.partition("=")
        if not (equals and re.fullmatch(r"[a-z][a-z0-9_]*", name)):
            refuse(f"sglang.extra_args: {text!r} given; needs NAME=VALUE of a server argument; change it")
        elif name in _HERE:
            refuse(f"sglang.extra_args: {name} has a setting of its own here; set {_HERE[name]}")
        elif _SET_BY_US.fullmatch(name):
            refuse(
                f"sglang.extra_args: {name} is not free: the engine sets it by itself, or could not keep "
                "its weights or log-probs right with it; remove it"
            )
        elif name.startswith("speculative_"):
            _refuse_speculation("sglang.extra_args", text)
        else:
            refuse_repacking("sglang.extra_args", name, text)
        if value.lower() in ("", "none", "null"):
            refuse(f"sglang.extra_args: {text!r} has no value; needs NAME=VALUE; leave it out")
        try:
            argument_value(text)
        except yaml.YAMLError as error:
            said = " ".join(str(error).split())
            refuse(f"sglang.extra_args: {text!r} is no YAML ({said}); needs NAME=VALUE; quote the value")


def argument_name(text: str) -> str:
    """Of one of `extra_args`."""
    return text.partition("=")[0]


def argument_value(text: str) -> Any:
    """Of one of `extra_args`, as YAML has it.

    Raises:
        yaml.YAMLError: It is none.
    """
    return yaml.safe_load(text.partition("=")[2])


def is_taken(name: str) -> bool:
    """Whether an argument may be among `extra_args` at all, or has a setting of its own."""
    return not (_SET_BY_US.fullmatch(name) or _REPACKS.search(name) or name.startswith("speculative_"))


def refuse_repacking(where: str, name: str, value: object) -> None:
    """Refuse an option that makes an engine lay out its weights in another way than it was told."""
    if found := _REPACKS.search(f"{name}={value}"):
        refuse(
            f"{where}: {value} given, but options of {found.group().lower()} repack or quantise weights, which a "
            "sync would not undo; needs weights as the model has them; remove it"
        )


def _refuse_speculation(where: str, value: str) -> None:
    refuse(f"{where}: {value} given, but speculative decoding is not for training: {_NO_SPECULATION}; remove it")
