"""SGLang's server arguments for one engine, from the run's settings. Imports nothing of SGLang."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.errors import EngineError
from rlhf.families.spec import ModelSpec
from rlhf.rollout.seeds import shifted
from rlhf.rollout.sglang.inside import LOADER
from rlhf.rollout.sglang.layout import Sizes, check_cpu_sizes
from rlhf.rollout.sglang.sampling import BACKEND, BEGUN, STOP

SPARE_TOKENS = 64
"""SGLang keeps some room of its cache and of a sequence's length to itself; `rollout.kv_cache_tokens` is all ours."""
ENVIRONMENT = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by SPARE_TOKENS
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",  # a queue in /dev/shm, which a killed scheduler would leave behind
}
"""Variables of every engine's processes."""
NO_VERSION = "-1"
"""Weight version of the random weights that an engine starts with."""


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


def server_args(
    spec: ModelSpec, config: RolloutConfig, *, place: Place, model_folder: Path, run_seed: int
) -> dict[str, Any]:
    """Keyword arguments of SGLang's Engine; `model_folder` holds a config.json, no weights are read.

    Raises:
        EngineError, LayoutError: The settings ask for what SGLang has on GPUs only.
    """
    options = config.sglang
    if place.device == "cpu" and options.deterministic:
        raise EngineError(
            "sglang engine: rollout.sglang.deterministic on a CPU, for which SGLang has no such attention; unset it"
        )
    if place.device == "cpu":
        check_cpu_sizes(spec, Sizes(config.tp, options.ep))
    args: dict[str, Any] = {
        "model_path": str(model_folder),
        "skip_tokenizer_init": True,
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
        "grammar_backend": "none",
        "sampling_backend": BACKEND,
        "sleep_on_idle": True,  # a scheduler that waits would else keep a core busy while models train
        "watchdog_timeout": options.reply_limit_s,
        "log_level": options.log_level,
    }
    if place.device == "cpu":
        args |= {
            "attention_backend": "torch_native" if options.attention_backend == "auto" else options.attention_backend,
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.05,  # its sizes come from max_total_tokens
        }
    else:
        args |= {
            "mem_fraction_static": options.mem_fraction,
            "disable_cuda_graph": not options.cuda_graph,
            "enable_memory_saver": True,
            "enable_deterministic_inference": options.deterministic,
        }
        if options.attention_backend != "auto":
            args["attention_backend"] = options.attention_backend
    return args | {name: yaml.safe_load(value) for name, _, value in (t.partition("=") for t in options.extra_args)}


def sampling_args(
    sampling: SamplingConfig, eos_token_ids: tuple[int, ...], *, seed: int, prompt_tokens: int, begun_tokens: int = 0
) -> dict[str, Any]:
    """One request's sampling parameters in SGLang's words.

    seed: The sample's, `sample_seed`; its numbers are those of the places in the response, also where the request
        brings the first `begun_tokens` of the response behind the prompt's `prompt_tokens`.
    """
    ends = [] if sampling.ignore_eos else sorted({*eos_token_ids, *sampling.stop_token_ids})
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens - begun_tokens,
        "stop_token_ids": ends,
        "ignore_eos": not ends,
        "sampling_seed": shifted(seed, prompt_tokens - 1),  # SGLang counts from the sequence's first token
        "custom_params": {STOP: list(sampling.stop), BEGUN: begun_tokens} if sampling.stop else None,
    }


def cpu_environment(tp: int, *, leader: int, threads: int, cores: list[int]) -> dict[str, str]:
    """Variables of an engine on CPUs: `threads` cores for each of its ranks, beginning after those of earlier ranks.

    SGLang wants to be told the cores; it binds to them where its kernels for CPUs are installed.
    """
    own = [[cores[((leader + rank) * threads + i) % len(cores)] for i in range(threads)] for rank in range(tp)]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, mine)) for mine in own),
        "TORCHDYNAMO_DISABLE": "1",
    }
