"""How SGLang's engines are started."""

import re
from dataclasses import dataclass

from rlhf.config.checks import at_least, between, more_than, refuse

_SET_BY_US = re.compile(
    r"model_path|tokenizer_path|skip_tokenizer_init|load_format|custom_weight_loader|device|dtype|tp_size|ep_size|dp_size|"
    r"pp_size|nnodes|node_rank|dist_init_addr|base_gpu_id|gpu_id_step|max_running_requests|max_total_tokens|"
    r"context_length|mem_fraction_static|random_seed|enable_memory_saver|weight_version|enable_dp_attention|"
    r"attention_backend|disable_cuda_graph|enable_deterministic_inference|watchdog_timeout|log_level|"
    r"speculative_.*|disaggregation_.*|weight_cache_.*|startup_weight_load_mode|.*lora.*"
)
"""Server arguments that the engine sets itself, or that a training rollout cannot do with."""

_REPACKS = re.compile(
    r"quant|fp8|fp4|int8|int4|w4a|awq|gptq|torchao|marlin|modelopt|aiter|trtllm|amx|interleave|cutlass|cutedsl|"
    r"deep_?gemm|humming|flash_rl|offload|kt_",
    re.IGNORECASE,
)
"""Names and values of options after which an engine's weights are no longer laid out as a sync writes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangConfig:
    """What `rollout.engine=sglang` has beyond the settings of every engine."""

    python: str = ""
    """Interpreter that engines run in, such as .venv-sglang/bin/python; empty takes the job's own."""
    ep: int = 1
    """Ranks of an engine that share out its experts; the others of its tp ranks cut them."""
    mem_fraction: float = 0.6
    """Share of a GPU's memory for an engine's weights, keys and values while it is awake."""
    attention_backend: str = "auto"
    """Attention kernels; auto takes torch's own on CPUs and leaves it to SGLang on GPUs."""
    cuda_graph: bool = True
    """Decode through CUDA graphs, on GPUs."""
    deterministic: bool = False
    """A sample's tokens depend on its seed alone; slower, and GPUs only."""
    extra_args: tuple[str, ...] = ()
    """More of SGLang's server arguments as NAME=VALUE, such as chunked_prefill_size=4096; VALUE is read as YAML."""
    start_limit_s: float = 600.0
    """An engine that is not ready after so many seconds ends the job."""
    reply_limit_s: float = 300.0
    """An engine that says nothing for so many seconds while it is at work ends the job."""
    log_level: str = "warning"
    """Of the engines' logs, logs/engine_R.log."""

    def __post_init__(self) -> None:
        at_least("sglang.ep", self.ep, 1)
        if more_than("sglang.mem_fraction", self.mem_fraction, 0.0):
            between("sglang.mem_fraction", self.mem_fraction, 0.0, 0.95)
        more_than("sglang.start_limit_s", self.start_limit_s, 0.0)
        more_than("sglang.reply_limit_s", self.reply_limit_s, 0.0)
        refuse_repacking("sglang.attention_backend", self.attention_backend, self.attention_backend)
        for text in self.extra_args:
            name, equals, value = text.partition("=")
            if not (equals and re.fullmatch(r"[a-z][a-z0-9_]*", name)):
                refuse(f"sglang.extra_args: {text!r} given; needs NAME=VALUE of a server argument; change it")
            elif _SET_BY_US.fullmatch(name):
                refuse(
                    f"sglang.extra_args: {name} is not free: the engine sets it by itself, or could not keep "
                    "its weights or log-probs right with it; remove it"
                )
            else:
                refuse_repacking("sglang.extra_args", name, text)
            if value.lower() in ("", "none", "null"):
                refuse(f"sglang.extra_args: {text!r} has no value; needs NAME=VALUE; leave it out")


def refuse_repacking(where: str, name: str, value: object) -> None:
    """Refuse an option that makes an engine lay out its weights in another way than it was told."""
    if found := _REPACKS.search(f"{name}={value}"):
        refuse(
            f"{where}: {value} given, but options of {found.group().lower()} repack or quantise weights, which a "
            "sync would not undo; needs weights as the model has them; remove it"
        )
