"""Answers from a model folder in a few lines of Python, outside training.

    from rlhf.build.generation import SamplingConfig, open_engine

    with open_engine("MODEL_FOLDER", engine="sglang") as engine:
        for answer in engine.generate(["2 + 2 =", [17, 42]], SamplingConfig(max_new_tokens=32), n=2):
            print(answer.prompt, answer.finish_reason, answer.text)

The engines are those of training; weights go in as its syncs bring them, block by block from the folder's files into
each tp rank's own shard, with checksums at the end. Imports no Megatron for Hugging Face folders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.build.engine_factories import engine_factory
from rlhf.build.engine_place import device_group_of, device_named, ranks_of_engine
from rlhf.build.folder_texts import FolderTexts
from rlhf.checkpoint.convert.hf import HfWeights
from rlhf.checkpoint.convert.opening import open_weights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.sources import Wanted, Weights
from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.sglang import SGLangConfig
from rlhf.data.batch import FinishReason, PromptBatch, Rollout
from rlhf.data.ragged import Ragged
from rlhf.data.record import PromptRecord
from rlhf.errors import CheckpointError, ConfigError, DataError, EngineError
from rlhf.families.folder import has_safetensors, resolve_folder
from rlhf.families.spec import Head
from rlhf.reshard.from_store import fill
from rlhf.reshard.layout import Box
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.sglang.arguments import check_installed
from rlhf.rollout.sglang.engine import SGLangEngine

__all__ = ["Answer", "GenerationEngine", "SGLangConfig", "SamplingConfig", "open_engine"]

WHERE = "open_engine"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    prompt: int
    """Place of its prompt among those given."""
    text: str
    """Special tokens left out; empty where the folder has no tokenizer."""
    tokens: tuple[int, ...]
    """The stop token included when one was sampled."""
    logprobs: tuple[float, ...]
    """Of each token under the tempered distribution, before top-p and top-k cut it."""
    finish_reason: str
    """stop, length or abort."""


class GenerationEngine:
    """A rollout engine with a folder's weights; made by `open_engine`, a context manager."""

    def __init__(self, config: RolloutConfig, *, dtype: str, device: str, seed: int, log_folder: Path | None) -> None:
        """Nothing is started before the first `load`."""
        self._config, self._dtype, self._device = config, dtype, device_named(device)
        self._seed, self._log_folder = seed, log_folder
        self._factory = engine_factory(config.engine)
        self._engine: RolloutEngine | None = None
        self._weights: Weights | None = None
        self._texts: FolderTexts | None = None
        self._group: ProcessGroup | None = None
        self._num_samples, self._version, self._is_loaded = 0, 0, False
        self.performance = PerformanceMonitor()
        """Latencies, rates, queue and cache hits of what was generated since the last `load`, or its own `start()`."""

    def load(self, folder: str | Path) -> None:
        """Take a folder's weights; the first starts the engine, a later one must hold the same model.

        Raises:
            CheckpointError: The folder holds no whole model that is known here, or another one than the engine's.
            ConfigError, EngineError, LayoutError: The engine cannot have this model in these settings, or did not
                start.
        """
        weights = _open(Path(resolve_folder(str(folder), where=WHERE)))
        if self._weights is not None and weights.spec != self._weights.spec:
            raise CheckpointError(
                f"{weights.path}: holds {weights.spec}; needs the model of the open engine, {self._weights.spec}; open "
                "another engine for it"
            )
        if self._engine is None:
            self._engine = self._start(weights)
        self._weights, self._is_loaded = weights, False
        self._version += 1
        into = self._engine.sinks() if isinstance(self._engine, SGLangEngine) else (self._engine.params(),)
        first = 0 if self._group is None else self._group.rank()
        fill(self._engine.layout(), dict(enumerate(into, start=first)), self._read)
        self._engine.weights_updated(self._version)
        self._is_loaded = True
        self.performance.start()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingConfig | None = None,
        *,
        n: int = 1,
        chat: bool = False,
    ) -> list[Answer]:
        """Answer prompts; blocks until all are answered.

        Where the engine has several ranks, all of them call with the same arguments; rank 0 gets the answers, the
        others an empty list.

        Args:
            prompts: Each a text, or token ids that are taken as they are.
            sampling: How; `SamplingConfig()` if not given.
            n: Answers to each prompt. They are independent samples: of each row, of each call.
            chat: Texts are a user's messages, wrapped in the tokenizer's chat template.

        Returns:
            n answers to the first prompt, then those to the next.

        Raises:
            DataError: A prompt is no text and no token ids, empty, too long for the model, or a text where the folder
                has no tokenizer or no chat template.
            EngineError: A token is outside the vocabulary, the engine has died, or its last `load` has failed.
        """
        engine, sampling = self._open_engine, sampling or SamplingConfig()
        if not self._is_loaded:
            raise EngineError("generate: the last load has failed half-way; needs whole weights; load a folder again")
        if n < 1:
            raise DataError(f"generate: n = {n}; needs at least 1 answer to a prompt; change it")
        if isinstance(prompts, str):
            raise DataError("generate: one text given; needs a list of prompts; put it in brackets")
        rows = [self._tokens(number, prompt, sampling, chat=chat) for number, prompt in enumerate(prompts)]
        batch = self._batch([row for row in rows for _ in range(n)], n)
        rollout = engine.generate(batch if self._leads else None, sampling)
        return [] if rollout is None else self._answers(rollout, n)

    def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _open_engine(self) -> RolloutEngine:
        if self._engine is None:
            raise EngineError("generate: the engine is closed; needs an open one; call open_engine again")
        return self._engine

    @property
    def _leads(self) -> bool:
        return self._group is None or self._group.rank() == 0

    def _start(self, weights: Weights) -> RolloutEngine:
        self._group = ranks_of_engine(self._config)
        self._texts = FolderTexts(weights.hf_files, weights=weights.path)
        return self._factory(
            weights.spec,
            self._config,
            tp_group=self._group
            if self._device.type == "cpu" or self._group is None
            else device_group_of(self._config),
            cpu_group=self._group,
            device=self._device,
            dtype=getattr(torch, self._dtype or ("float32" if self._device.type == "cpu" else "bfloat16")),
            run_seed=self._seed,
            eos_token_ids=self._texts.end_ids,
            log_folder=self._log_folder,
            decode=self._texts.decode,
            performance=self.performance,
        )

    def _read(self, tensor: str, box: Box) -> Tensor:
        """A block from the files, in the engine's dtype."""
        assert self._weights is not None, "load comes first"
        block = torch.empty(box.shape, dtype=getattr(torch, self._open_engine.layout().dtype))
        self._weights.read([Wanted(tensor, box, block)])
        return block

    def _tokens(self, number: int, prompt: str | Sequence[int], sampling: SamplingConfig, *, chat: bool) -> list[int]:
        assert self._weights is not None, "load comes first"
        assert self._texts is not None, "and reads the tokenizer"
        found = self._texts.encode(number, prompt, chat=chat) if isinstance(prompt, str) else _token_ids(number, prompt)
        longest = self._weights.spec.max_length
        if not found:
            raise DataError(f"generate: prompt {number} is empty; needs at least one token; leave it out")
        if len(found) + sampling.max_new_tokens > longest:
            raise DataError(
                f"generate: prompt {number} has {len(found)} tokens and may get max_new_tokens = "
                f"{sampling.max_new_tokens} more; needs at most {longest} together, the model's longest sequence; "
                "shorten it, or lower max_new_tokens"
            )
        if len(found) + sampling.max_new_tokens > self._config.kv_cache_tokens:
            raise DataError(
                f"generate: prompt {number} has {len(found)} tokens and may get max_new_tokens = "
                f"{sampling.max_new_tokens} more; needs at most kv_cache_tokens = {self._config.kv_cache_tokens} "
                "together; open the engine with more, or lower max_new_tokens"
            )
        return found

    def _batch(self, rows: list[list[int]], n: int) -> PromptBatch:
        first, self._num_samples = self._num_samples, self._num_samples + len(rows)
        numbers = torch.arange(first, first + len(rows))
        return PromptBatch(
            sample_ids=numbers,
            prompt_ids=(numbers - first) // n + first,
            tokens=Ragged.of([torch.tensor(row, dtype=torch.int64) for row in rows], dtype=torch.int64),
            records=(PromptRecord("", "", {}),) * len(rows),
        )

    def _answers(self, rollout: Rollout, n: int) -> list[Answer]:
        assert self._texts is not None, "load comes first"
        columns = zip(
            self._texts.read(rollout.responses),
            rollout.responses.rows(),
            rollout.rollout_logprobs.rows(),
            rollout.finish_reasons.tolist(),
            strict=True,
        )
        return [
            Answer(row // n, text, tuple(tokens.tolist()), tuple(logprobs.tolist()), FinishReason(reason).name.lower())
            for row, (text, tokens, logprobs, reason) in enumerate(columns)
        ]


def open_engine(
    folder: str | Path,
    *,
    engine: str = "native",
    tp: int = 1,
    dtype: str = "",
    device: str = "auto",
    seed: int = 0,
    max_running: int = 64,
    kv_cache_tokens: int = 16384,
    sglang: SGLangConfig | None = None,
    log_folder: Path | None = None,
) -> GenerationEngine:
    """An engine with the weights of a model folder, ready to generate.

    In a plain process. The native engine with tp > 1 needs as many ranks: start the script with torchrun and call
    `torch.distributed.init_process_group("gloo")` first; then all ranks make the same calls. SGLang's engine has
    processes of its own, so that one process may have it with any tp; under torchrun it may also be shared by tp ranks.

    Args:
        folder: A Hugging Face folder, a hub id in the local cache, or what `rlhf-convert` or a training run has saved.
        engine: native, sglang, or the import path `package.module:factory` of another one.
        tp: Tensor-parallel ranks of the engine.
        dtype: Of weights, keys and values; empty takes float32 on CPUs and bfloat16 on GPUs. Weights are cast to it.
        device: cpu, cuda, cuda:1, or auto: a GPU where there is one.
        seed: Of sampling. The same calls after the same start give the same tokens on the native engine.
        max_running: Most answers under way at a time; the others wait.
        kv_cache_tokens: Room for keys and values, in tokens.
        sglang: What SGLang's engine has beyond these settings.
        log_folder: Where SGLang's processes write their log; not given: a temporary folder.

    Raises:
        CheckpointError, ConfigError, EngineError, LayoutError: See `GenerationEngine.load`.
    """
    if dtype not in ("", *DTYPES):
        raise ConfigError(f"{WHERE}: dtype = {dtype!r} given; needs one of {', '.join(DTYPES)}; change it")
    config = RolloutConfig(
        engine=engine,
        tp=tp,
        max_running=max_running,
        kv_cache_tokens=kv_cache_tokens,
        sampling=SamplingConfig(max_new_tokens=1),  # each call brings its own
        sglang=sglang or SGLangConfig(),
    )
    if engine == "sglang":
        check_installed(config.sglang, where=f"{WHERE}: engine")
    made = GenerationEngine(config, dtype=dtype, device=device, seed=seed, log_folder=log_folder)
    try:
        made.load(folder)
    except BaseException:
        made.close()
        raise
    return made


def _token_ids(number: int, prompt: Sequence[int]) -> list[int]:
    """Python's integers or those of arrays; torch would cut off what is behind a point."""
    try:
        return [index(one) for one in prompt]
    except TypeError as error:
        raise DataError(
            f"generate: prompt {number} is {prompt!r:.80}; needs a text or a list of token ids; change it, and put a "
            "prompt that is alone in brackets"
        ) from error


def _open(folder: Path) -> Weights:
    weights = HfWeights(folder) if has_safetensors(folder) else open_weights(Given(folder))
    if weights.head is not Head.LM:
        raise CheckpointError(
            f"{weights.path}: holds a critic or reward model, which gives no tokens; needs a language model; take "
            "another folder"
        )
    return weights
