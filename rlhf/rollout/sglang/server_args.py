"""SGLang's server arguments for one engine, from the run's settings. Imports nothing of SGLang."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.sglang import BY_SEED, SGLangConfig, argument_name, argument_value
from rlhf.families.spec import ModelSpec
from rlhf.rollout.seeds import shifted
from rlhf.rollout.sglang.arguments import check_arguments
from rlhf.rollout.sglang.cpu import check_cpu_options, check_cpu_sizes, cpu_args
from rlhf.rollout.sglang.inside.entries import LOADER
from rlhf.rollout.sglang.inside.sampling import BACKEND, BEGUN, STOP
from rlhf.rollout.sglang.layout import Sizes

SPARE_TOKENS = 64
"""SGLang keeps some room of its cache and of a sequence's length to itself; `rollout.kv_cache_tokens` is all ours."""
ENVIRONMENT = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by SPARE_TOKENS
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",  # a queue in /dev/shm, which a killed scheduler would leave behind
}
"""Variables of every engine's processes."""
TOP_K_ALL = 2**30
"""What SGLang takes for no limit, and keeps in 32 bits."""
NO_VERSION = "-1"
"""Weight version of the random weights that an engine starts with."""

NO_WATCHDOG_S = 1e9
"""SGLang's own watchdog counts time in which the whole job is suspended, and ends a slow start; `life/` watches."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine runs."""

    device: str
    """cpu or cuda."""
    first_gpu: int
    """Index of its first rank's GPU; 0 on CPUs."""
    gpu_step: int
    """From the GPU of one rank to that of the next; 1 on CPUs."""
    dtype: str
    num_nodes: int = 1
    """Hosts that it lies on."""
    node: int = 0
    """Which of them this is."""
    meets_at: str = ""
    """ADDRESS:PORT, where there are several."""


def server_args(
    spec: ModelSpec, config: RolloutConfig, *, place: Place, model_folder: Path, run_seed: int
) -> dict[str, Any]:
    """Keyword arguments of SGLang's Engine; `model_folder` holds a config.json, no weights are read.

    Raises:
        ConfigError, LayoutError: The settings ask for what SGLang has on GPUs only, or not at all.
    """
    options = config.sglang
    args: dict[str, Any] = {
        "model_path": str(model_folder),
        "skip_tokenizer_init": True,  # tokens come in and go out; strings end responses by `stopping.py`
        "load_format": "dummy",  # random weights: the first sync brings all of them
        "custom_weight_loader": [LOADER],
        "weight_version": NO_VERSION,
        "device": place.device,
        "dtype": place.dtype,
        "tp_size": config.tp,
        "ep_size": options.ep,
        "base_gpu_id": place.first_gpu,
        "gpu_id_step": place.gpu_step,
        "max_running_requests": config.max_running,
        "max_total_tokens": config.kv_cache_tokens + SPARE_TOKENS,
        "context_length": spec.max_length + SPARE_TOKENS,
        "random_seed": run_seed & 0x7FFFFFFF,
        "schedule_policy": options.schedule_policy,
        "disable_radix_cache": not options.radix_cache,
        "sampling_backend": BACKEND if options.sampling_backend == BY_SEED else options.sampling_backend,
        "grammar_backend": "none",
        "sleep_on_idle": True,  # a scheduler that waits would else keep a core busy while models train
        "watchdog_timeout": NO_WATCHDOG_S,
        "log_level": options.log_level,
    }
    if options.chunked_prefill_size:
        args["chunked_prefill_size"] = options.chunked_prefill_size
    if place.num_nodes > 1:
        args |= {"nnodes": place.num_nodes, "node_rank": place.node, "dist_init_addr": place.meets_at}
    if place.device == "cpu":
        check_cpu_options(options)
        check_cpu_sizes(spec, Sizes(config.tp, options.ep))
        args |= cpu_args()
    else:
        args |= _gpu_args(options)
    check_arguments(options)
    more = {argument_name(text): argument_value(text) for text in options.extra_args}
    # In pages the cache is rounded down, a prompt is rounded up, and one page stays in reserve.
    args["max_total_tokens"] += 3 * more.get("page_size", 0)
    return args | more


def _gpu_args(options: SGLangConfig) -> dict[str, Any]:
    backends = {
        name: getattr(options, name) for name in (f"{of}attention_backend" for of in ("", "prefill_", "decode_"))
    }
    args = {
        "mem_fraction_static": options.mem_fraction_static,
        "disable_cuda_graph": not options.cuda_graph,
        "enable_memory_saver": True,
        "enable_deterministic_inference": options.deterministic,
        "kv_cache_dtype": options.kv_cache_dtype,
    }
    if options.cuda_graph_max_batch:
        args["cuda_graph_max_bs_decode"] = options.cuda_graph_max_batch
    return args | {name: value for name, value in backends.items() if value != "auto"}


def sampling_args(
    sampling: SamplingConfig, eos_token_ids: tuple[int, ...], *, seed: int, prompt_tokens: int, begun_tokens: int = 0
) -> dict[str, Any]:
    """One request's sampling parameters in SGLang's words.

    seed: The sample's, `sample_seed`; its numbers are those of the places in the response, also where the request
        brings the first `begun_tokens` of the response behind the prompt's `prompt_tokens`.

    By a top_k of 1 SGLang knows rows of temperature 0, whose log-probs are those of temperature 1. Where it is
    asked for beside another temperature, the most likely token is kept by min-p instead.
    """
    top_k, min_p = sampling.top_k, sampling.min_p
    if top_k == 1 and sampling.temperature:
        top_k, min_p = 0, 1.0
    ends = [] if sampling.ignore_eos else sorted({*eos_token_ids, *sampling.stop_token_ids})
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": top_k if 0 < top_k < TOP_K_ALL else -1,
        "min_p": min_p,
        "max_new_tokens": sampling.max_new_tokens - begun_tokens,
        "stop_token_ids": ends,
        "ignore_eos": not ends,
        "sampling_seed": shifted(seed, prompt_tokens - 1),  # SGLang counts from the sequence's first token
        "custom_params": {STOP: list(sampling.stop), BEGUN: begun_tokens} if sampling.stop else None,
    }
