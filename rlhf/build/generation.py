"""Answers from a model folder in a few lines of Python, outside training.

    from rlhf.build.generation import SamplingConfig, open_engine

    with open_engine("MODEL_FOLDER", engine="sglang") as engine:
        for answer in engine.generate(["2 + 2 =", [17, 42]], SamplingConfig(max_new_tokens=32), n=2):
            print(answer.prompt, answer.finish_reason, answer.text)

The engines are those of training; weights go in as its syncs bring them, block by block from the folder's files into
each tp rank's own shard, with checksums at the end. Imports no Megatron for Hugging Face folders.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from rlhf.build.folder_engine import WHERE, FolderEngine
from rlhf.build.folder_texts import FolderTexts
from rlhf.build.prompt_rows import positive, prompt_rows
from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.sglang import SGLangConfig
from rlhf.data.batch import FinishReason, PromptBatch, Rollout
from rlhf.data.ragged import Ragged
from rlhf.data.record import PromptRecord
from rlhf.errors import ConfigError
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.sglang.arguments import check_installed

__all__ = ["Answer", "GenerationEngine", "SGLangConfig", "SamplingConfig", "open_engine"]

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
        self.performance = PerformanceMonitor()
        """Latencies, rates, queue and cache hits of what was generated since the last `load`, or its own `start()`."""
        self._engine = FolderEngine(
            config, dtype=dtype, device=device, seed=seed, log_folder=log_folder, performance=self.performance
        )
        self._num_samples = 0

    def load(self, folder: str | Path) -> None:
        """Take a folder's weights, and its tokenizer, chat template and end tokens.

        Weights of the same model go into the running engine. For another model, or a tokenizer that reads tokens in
        another way, the engine is ended and started anew in the same settings; also after it was lost.

        Raises:
            CheckpointError, LayoutError: The folder holds no whole model that is known here, or one that the layout
                cannot have. What was there before stays loaded, unless files turn out to be damaged on the way.
            EngineError: The engine is closed.
            ConfigError, EngineError: It cannot have this model in these settings, or did not start: nothing is loaded.
        """
        self._engine.load(folder)
        self.performance.start()

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]],
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
            sampling: How; `SamplingConfig()` if not given. The folder's end tokens end answers too.
            n: Answers to each prompt. They are independent samples: of each row, of each call.
            chat: Texts are a user's messages, wrapped in the tokenizer's chat template.

        Returns:
            n answers to the first prompt, then those to the next.

        Raises:
            DataError: A prompt is no text and no token ids, empty, too long for the model, has a token outside the
                vocabulary, or is a text where the folder has no tokenizer or no chat template.
            ConfigError: `sampling` is no SamplingConfig.
            EngineError: The engine is closed, or its last `load` has failed.
            EngineLostError: A process of it has died. The next `load` starts it anew.
        """
        self._engine.require_open()
        if not isinstance(sampling, SamplingConfig | None):
            raise ConfigError(f"generate: sampling = {sampling!r:.80}; needs a SamplingConfig(...); change it")
        texts, sampling, n = self._engine.texts, sampling or SamplingConfig(), positive("n", n)
        rows = prompt_rows(prompts, sampling, encode=partial(texts.encode, chat=chat), room=self._engine.room)
        batch = self._batch([row for row in rows for _ in range(n)], n)
        if not sampling.ignore_eos:
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *texts.end_ids))
        rollout = self._engine.generate(batch if self._engine.rank == 0 else None, sampling)
        return [] if rollout is None else _answers(rollout, n, texts)

    def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self._engine.config
        return f"<GenerationEngine {config.engine}, tp {config.tp}, {self._engine.device}: {self._engine.state}>"

    def _batch(self, rows: list[list[int]], n: int) -> PromptBatch:
        first, self._num_samples = self._num_samples, self._num_samples + len(rows)
        numbers = torch.arange(first, first + len(rows))
        return PromptBatch(
            sample_ids=numbers,
            prompt_ids=(numbers - first) // n + first,
            tokens=Ragged.of([torch.tensor(row, dtype=torch.int64) for row in rows], dtype=torch.int64),
            records=(PromptRecord("", "", {}),) * len(rows),
        )


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


def _answers(rollout: Rollout, n: int, texts: FolderTexts) -> list[Answer]:
    columns = zip(
        texts.read(rollout.responses),
        rollout.responses.rows(),
        rollout.rollout_logprobs.rows(),
        rollout.finish_reasons.tolist(),
        strict=True,
    )
    return [
        Answer(row // n, text, tuple(tokens.tolist()), tuple(logprobs.tolist()), FinishReason(reason).name.lower())
        for row, (text, tokens, logprobs, reason) in enumerate(columns)
    ]
