"""The embedded rollout engine: scheduler, cache, model and sampler put together."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import PromptBatch, Rollout
from rlhf.errors import EngineError
from rlhf.families.spec import ModelSpec
from rlhf.reshard.layout import ModelLayout
from rlhf.rollout.admission import check_can_stop
from rlhf.rollout.engine import ProgressFn
from rlhf.rollout.feed import Feed, Work
from rlhf.rollout.ledger import Ledger
from rlhf.rollout.native.decoder import Decoder
from rlhf.rollout.native.intake import Intake
from rlhf.rollout.native.kv_cache import KvCache
from rlhf.rollout.native.layout import native_layout
from rlhf.rollout.native.model import NativeModel
from rlhf.rollout.native.peers import Peers
from rlhf.rollout.native.weight_memory import WeightMemory
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.stopping import Decode
from rlhf.rollout.submissions import Submissions, collect

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class NativeEngine:
    """A `RolloutEngine` in plain torch; see there for the methods and `EngineFactory` for the arguments."""

    continues = True

    def __init__(
        self,
        spec: ModelSpec,
        config: RolloutConfig,
        *,
        tp_group: ProcessGroup | None,
        cpu_group: ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
        run_seed: int,
        eos_token_ids: tuple[int, ...],
        on_progress: ProgressFn | None = None,
        log_folder: Path | None = None,
        performance: PerformanceMonitor | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._spec, self._config, self._run_seed = spec, config, run_seed
        self._eos_token_ids, self._decode = eos_token_ids, decode
        self._peers = Peers(tp_group, cpu_group)
        if self._peers.size != config.tp:
            raise EngineError(f"native engine: tp_group has {self._peers.size} ranks, but rollout.tp = {config.tp}")
        self._model = NativeModel(spec, self._peers, dtype=dtype, device=device)
        self._on_progress = on_progress
        self._performance = performance
        self._policy_version = 0
        self._submitted: Submissions = []
        self._cache: KvCache | None = None
        self._weights: WeightMemory | None = None
        self._runs = False
        self.wake()

    def run(self, feed: Feed | None, sampling: SamplingConfig) -> None:
        """See `RolloutEngine.run`."""
        cache = self._check_awake()
        check_can_stop(sampling.stop, self._decode, where="native engine")
        self._model.pack()
        decoder = Decoder(
            self._model,
            cache,
            self._peers,
            sampling=sampling,
            stop_ids=self._stop_ids(sampling),
            decode=self._decode,
            max_running=self._config.max_running,
        )
        ledger = self._ledger(sampling) if self._peers.is_leader else None
        self._runs = True
        try:
            decoder.run(Intake(self._peers, feed, ledger, self._on_progress))
        finally:
            self._runs = False

    def submit(self, prompts: PromptBatch | None, sampling: SamplingConfig, *, attempt: int = 0) -> None:
        """See `RolloutEngine.submit`."""

        def checked() -> Work:
            check_can_stop(sampling.stop, self._decode, where="native engine")
            if prompts is None:
                raise EngineError(
                    "native engine: no prompts on the leader (tp rank 0); needs a PromptBatch, maybe empty"
                )
            self._ledger(sampling).check(prompts)
            return Work(prompts, attempt=attempt)

        self._submitted.append((sampling, self._peers.together(checked)))

    def collect(self) -> Rollout | None:
        """See `RolloutEngine.collect`."""
        if not self._submitted:
            raise EngineError("native engine: nothing was submitted since the last collect; call submit() first")
        self._check_awake()
        submitted, self._submitted = self._submitted, []
        return collect(self, submitted)

    def generate(self, prompts: PromptBatch | None, sampling: SamplingConfig, *, attempt: int = 0) -> Rollout | None:
        """See `RolloutEngine.generate`."""
        self.submit(prompts, sampling, attempt=attempt)
        return self.collect()

    @staticmethod
    def layout_of(spec: ModelSpec, config: RolloutConfig, *, dtype: str) -> ModelLayout:
        """See `EngineFactory.layout_of`."""
        return native_layout(
            spec, tp=config.tp, dp=config.dp, first_rank=config.first_rank, stride=config.stride, dtype=dtype
        )

    def layout(self) -> ModelLayout:
        """See `RolloutEngine.layout`."""
        return self.layout_of(self._spec, self._config, dtype=_DTYPE_NAMES[self._model.dtype])

    def params(self) -> dict[str, Tensor]:
        """See `RolloutEngine.params`."""
        return self._model.params

    def weights_updated(self, policy_version: int) -> None:
        """See `RolloutEngine.weights_updated`."""
        self._model.unpack()
        if self._weights is not None:
            self._weights.check_written()
        self._policy_version = policy_version

    def sleep(self, *, weights: bool = False) -> int:
        """See `RolloutEngine.sleep`; of this rank's tensors, so on each rank, by their sizes."""
        if self._runs:
            raise EngineError("native engine: rows are running; needs their memory; sleep once run() has returned")
        given = 0 if self._cache is None else self._cache.num_bytes
        self._cache = None
        self._model.unpack()
        if weights and self._weights is None:
            layout = self.layout()
            rank = dist.get_rank() if dist.is_initialized() else layout.ranks[0]
            self._weights = WeightMemory(self._model.params, layout.holdings(rank))
        return given + (self._weights.give_back() if weights and self._weights else 0)

    def wake_weights(self) -> None:
        """See `RolloutEngine.wake_weights`."""
        if self._weights is not None:
            self._weights.take_again()

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        if self._cache is None:
            self._cache = KvCache(
                num_layers=self._spec.num_layers,
                kv_heads=self._model.kv_heads,
                head_dim=self._spec.head_dim,
                tokens=self._config.kv_cache_tokens,
                dtype=self._model.dtype,
                device=self._model.device,
            )

    def check(self) -> None:
        """See `RolloutEngine.check`."""

    def restart(self) -> None:
        """See `RolloutEngine.restart`: it lives in its rank, and is lost with it."""

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self.sleep()
        self._model.params.clear()

    def _check_awake(self) -> KvCache:
        if self._weights is not None and not self._weights.holds_all:
            raise EngineError("native engine: its weights were given back; needs a complete update to generate")
        if self._cache is None:
            raise EngineError(
                "native engine: asleep; needs the memory of keys and values to generate; call wake() first"
            )
        return self._cache

    def _ledger(self, sampling: SamplingConfig) -> Ledger:
        return Ledger(
            sampling,
            vocab_size=self._spec.vocab_size,
            kv_cache_tokens=self._config.kv_cache_tokens,
            run_seed=self._run_seed,
            policy_version=self._policy_version,
            where="native engine",
            performance=self._performance,
        )

    def _stop_ids(self, sampling: SamplingConfig) -> Tensor:
        ids = [] if sampling.ignore_eos else sorted({*self._eos_token_ids, *sampling.stop_token_ids})
        return torch.tensor(ids, dtype=torch.int64, device=self._model.device)
