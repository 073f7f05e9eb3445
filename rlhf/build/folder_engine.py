"""A rollout engine that has the weights of a model folder, outside training: started, filled from files, ended."""

import warnings
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.build.engine_factories import engine_factory
from rlhf.build.engine_place import device_group_of, device_named, ranks_of_engine
from rlhf.build.folder_texts import FolderTexts
from rlhf.build.prompt_rows import Room
from rlhf.checkpoint.convert.hf import HfWeights
from rlhf.checkpoint.convert.opening import open_weights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.sources import Wanted, Weights
from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import PromptBatch, Rollout
from rlhf.errors import CheckpointError, EngineError, EngineLostError
from rlhf.families.folder import has_safetensors, resolve_folder
from rlhf.families.spec import Head
from rlhf.reshard.from_store import fill
from rlhf.reshard.layout import Box
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.sglang.cpu import idle_on_cpu
from rlhf.rollout.sglang.engine import SGLangEngine

WHERE = "open_engine"


class FolderEngine:
    """Nothing is started before the first `load`. Where the engine has several ranks, all of them make all calls.

    An engine that is forgotten is closed, and at the interpreter's exit too.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        dtype: str,
        device: str,
        seed: int,
        log_folder: Path | None,
        performance: PerformanceMonitor,
    ) -> None:
        """Arguments are those of `rlhf.build.generation.open_engine`."""
        self.config, self.device = config, device_named(device)
        self._dtype = dtype or ("float32" if self.device.type == "cpu" else "bfloat16")
        self._seed, self._log_folder, self._performance = seed, log_folder, performance
        self._factory = engine_factory(config.engine)
        self._running: list[RolloutEngine] = []
        """The engine, where there is one."""
        weakref.finalize(self, _end, self._running)  # forgotten, or at the interpreter's exit
        self._weights: Weights | None = None
        self._texts: FolderTexts | None = None
        self._groups: tuple[ProcessGroup | None, ProcessGroup | None] | None = None
        self._version, self._is_closed = 0, False
        self._lacks = "nothing was loaded; needs weights"

    def load(self, folder: str | Path) -> None:
        """See `GenerationEngine.load`."""
        if self._is_closed:
            raise EngineError("load: the engine is closed; needs an open one; call open_engine")
        weights = _open(Path(resolve_folder(str(folder), where=WHERE)))
        texts = FolderTexts(weights.hf_files, weights=weights.path)
        self._factory.layout_of(weights.spec, self.config, dtype=self._dtype)  # raises what no engine could have
        if self._weights is None or weights.spec != self._weights.spec or not texts.read_like(self._texts):
            _end(self._running)
        self._lacks = "the last load has failed half-way; needs whole weights"
        if not self._running:
            self._running.append(self._start(weights, texts))
        self._weights, self._texts = weights, texts
        self._version += 1
        try:
            self._fill(self._running[0])
        except EngineLostError:
            _end(self._running)
            raise
        self._lacks = ""

    def generate(self, batch: PromptBatch | None, sampling: SamplingConfig) -> Rollout | None:
        """See `RolloutEngine.generate`.

        Raises:
            EngineLostError: The engine has died; the next `load` starts it anew.
        """
        self.require_open()
        try:
            return self._running[0].generate(batch, sampling)
        except EngineLostError:
            self._lacks = "the engine was lost; needs a new start"
            _end(self._running)
            raise

    def close(self) -> None:
        """End the engine and its processes for good. Idempotent."""
        self._is_closed = True
        _end(self._running)

    def require_open(self) -> None:
        """Nothing, when it can answer.

        Raises:
            EngineError: It is closed, was lost, or its last `load` has failed.
        """
        if self._is_closed:
            raise EngineError("generate: the engine is closed; needs an open one; call open_engine again")
        if self._lacks:
            raise EngineError(f"generate: {self._lacks}; load a folder")

    @property
    def state(self) -> str:
        """In words."""
        weights = "" if self._weights is None else f"weights of {self._weights.path}"
        return "closed" if self._is_closed else self._lacks or weights

    @property
    def rank(self) -> int:
        """Of this process among those that share the engine; 0 leads."""
        group = self._groups[0] if self._groups else None
        return 0 if group is None else group.rank()

    @property
    def texts(self) -> FolderTexts:
        """Of the folder that was loaded last."""
        assert self._texts is not None, "load comes first"
        return self._texts

    @property
    def room(self) -> Room:
        """What a prompt and its response must fit into."""
        assert self._weights is not None, "load comes first"
        spec, tokens = self._weights.spec, self.config.kv_cache_tokens
        return Room(vocab_size=spec.vocab_size, max_length=spec.max_length, kv_cache_tokens=tokens)

    def _start(self, weights: Weights, texts: FolderTexts) -> RolloutEngine:
        """A new engine. Which tokens end a response comes with each call: folders of one model may differ in it."""
        if self._groups is None:
            group = ranks_of_engine(self.config)
            self._groups = group, group and (group if self.device.type == "cpu" else device_group_of(self.config))
            is_on_cpu = self.config.engine == "sglang" and self.device.type == "cpu"
            if is_on_cpu and (idle := idle_on_cpu(self.config.sglang)):
                warnings.warn(idle, stacklevel=5)
        return self._factory(
            weights.spec,
            self.config,
            tp_group=self._groups[1],
            cpu_group=self._groups[0],
            device=self.device,
            dtype=getattr(torch, self._dtype),
            run_seed=self._seed,
            eos_token_ids=(),
            log_folder=self._log_folder,
            decode=texts.decode,
            performance=self._performance,
        )

    def _fill(self, engine: RolloutEngine) -> None:
        into = engine.sinks() if isinstance(engine, SGLangEngine) else (engine.params(),)
        fill(engine.layout(), dict(enumerate(into, start=self.rank)), self._read)
        engine.weights_updated(self._version)

    def _read(self, tensor: str, box: Box) -> Tensor:
        """A block from the files, in the engine's dtype."""
        assert self._weights is not None, "load comes first"
        block = torch.empty(box.shape, dtype=getattr(torch, self._dtype))
        self._weights.read([Wanted(tensor, box, block)])
        return block


def _end(running: list[RolloutEngine]) -> None:
    while running:
        running.pop().close()


def _open(folder: Path) -> Weights:
    weights = HfWeights(folder) if has_safetensors(folder) else open_weights(Given(folder))
    if weights.head is not Head.LM:
        raise CheckpointError(
            f"{weights.path}: holds a critic or reward model, which gives no tokens; needs a language model; take "
            "another folder"
        )
    return weights
