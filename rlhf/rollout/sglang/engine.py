"""The rollout engine on SGLang: its leader rank speaks to the host process, the other ranks stand by."""

import shutil
import socket
from pathlib import Path
from typing import Any

import torch
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
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.sglang.layout import sglang_layout
from rlhf.rollout.sglang.life.process import HostProcess
from rlhf.rollout.sglang.memory import KV_CACHE, WEIGHTS, used_bytes
from rlhf.rollout.sglang.multi_host.nodes import Nodes
from rlhf.rollout.sglang.run import Run
from rlhf.rollout.sglang.server_args import NO_VERSION
from rlhf.rollout.sglang.start import HostStart, parties
from rlhf.rollout.sglang.team import Team
from rlhf.rollout.sglang.weights.entrance import Entrance
from rlhf.rollout.sglang.weights.lasting import LastingSink
from rlhf.rollout.sglang.weights.sink import SchedulerSink
from rlhf.rollout.sglang.wire import Errand
from rlhf.rollout.stopping import Decode
from rlhf.rollout.submissions import Submissions, collect

WHERE = "sglang engine"
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class SGLangEngine:
    """A `RolloutEngine` on SGLang; see there for the methods and `EngineFactory` for the arguments.

    `host` names the machine of this rank; empty: by its host name.

    The engine's processes are children of the leader rank, or, on another host, of its first rank there; without a
    `cpu_group` one process speaks for all tp ranks. It starts from random weights and answers nothing before a first
    update, which comes in through `params`, a `WindowSink` (or through `sinks`), and ends with `weights_updated`.

    A sample's tokens depend on its seed, not on the batch, for SGLang draws by a sampler of ours (`sampling.py`); up to
    rounding, since SGLang's matrix products on a row may depend on how many rows there are.

    Log-probs are of the distribution that the temperature gives, before top-p and top-k cut it (not renormalised), as
    the native engine's are; at temperature 0, of temperature 1.

    Raises:
        EngineError: The engine did not start (with the end of its log), or its ranks cannot share one. On all ranks.
        LayoutError: SGLang's parameters are not those that `layout` describes.
    """

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
        host: str = "",
    ) -> None:
        self._spec, self._config, self._run_seed, self._dtype = spec, config, run_seed, dtype
        self._eos_token_ids, self._on_progress, self._decode = eos_token_ids, on_progress, decode
        self._performance = performance
        self._team = Team(cpu_group)
        if cpu_group is not None and self._team.size != config.tp:
            raise EngineError(f"{WHERE}: cpu_group has {self._team.size} ranks, but rollout.tp = {config.tp}")
        self._submitted: Submissions = []
        self._version, self._awake, self._lost_weights = NO_VERSION, True, False
        self._device, self._runs = device, False
        self._folder: Path | None = None
        self._host: HostProcess | None = None
        self._entrance = Entrance(
            spec, config, dtype=_DTYPE_NAMES[dtype], device=device, cpu_group=cpu_group, team=self._team
        )
        nodes = self._team.nodes(device, host or socket.gethostname())

        self._team.ask_witnesses(nodes, lambda: "" if self._host is None else self._host.witness())
        hosts = HostStart(
            spec=spec,
            config=config,
            device=device.type,
            dtype=_DTYPE_NAMES[dtype],
            run_seed=run_seed,
            decode=decode,
            log_folder=log_folder,
            on_wait=lambda: on_progress(0, 0) if on_progress else None,
        )

        def start() -> None:
            self._start_hosts(hosts, nodes)
            self._entrance.open(self._host if self._team.is_leader else None)
            self._end_update(NO_VERSION)

        self._start_all = start
        self.restart()

    # Sampling

    def run(self, feed: Feed | None, sampling: SamplingConfig) -> None:
        """See `RolloutEngine.run`.

        Raises:
            EngineError: As there; also when the host process died, hangs, or answered by other weights than the last
                update's. On all ranks.
        """
        self._check_awake()
        self._runs = True
        try:
            self._team.together(lambda: self._run(feed, sampling))
        finally:
            self._runs = False

    def submit(self, prompts: PromptBatch | None, sampling: SamplingConfig, *, attempt: int = 0) -> None:
        """See `RolloutEngine.submit`."""

        def checked() -> Work:
            if prompts is None:
                raise EngineError(f"{WHERE}: no prompts on the leader (tp rank 0); needs a PromptBatch, maybe empty")
            check_can_stop(sampling.stop, self._decode, where=WHERE)
            self._ledger(sampling).check(prompts)
            return Work(prompts, attempt=attempt)

        self._submitted.append((sampling, self._team.together(checked)))

    def collect(self) -> Rollout | None:
        """See `RolloutEngine.collect`."""
        if not self._submitted:
            raise EngineError(f"{WHERE}: nothing was submitted since the last collect; call submit() first")
        self._check_awake()
        self._team.together(self._check_weights)
        submitted, self._submitted = self._submitted, []
        return collect(self, submitted)

    def generate(self, prompts: PromptBatch | None, sampling: SamplingConfig, *, attempt: int = 0) -> Rollout | None:
        """See `RolloutEngine.generate`."""
        self.submit(prompts, sampling, attempt=attempt)
        return self.collect()

    # Weights

    @staticmethod
    def layout_of(spec: ModelSpec, config: RolloutConfig, *, dtype: str) -> ModelLayout:
        """See `EngineFactory.layout_of`."""
        return sglang_layout(
            spec,
            tp=config.tp,
            ep=config.sglang.ep,
            dp=config.dp,
            first_rank=config.first_rank,
            stride=config.stride,
            dtype=dtype,
        )

    def layout(self) -> ModelLayout:
        """See `RolloutEngine.layout`."""
        return self.layout_of(self._spec, self._config, dtype=_DTYPE_NAMES[self._dtype])

    def params(self) -> SchedulerSink | LastingSink:
        """See `RolloutEngine.params`: the weights are in SGLang's processes, and come in through this rank's sink.

        With `rollout.on_loss=replace` a transfer goes through even when the engine is lost on the way.
        """
        return self._entrance.params()

    def sinks(self) -> tuple[SchedulerSink, ...]:
        """As `params`, the sinks of all tp ranks that this process speaks for: its own, or all where it is alone."""
        return self._entrance.sinks

    def ask_schedulers(self, errand: Errand) -> list[Any] | None:
        """Run an errand on every scheduler outside of an update; on the leader its values by tp rank. Collective."""
        return self._team.together(lambda: self._alive.call("ask_schedulers", errand))

    def weights_updated(self, policy_version: int) -> None:
        """See `RolloutEngine.weights_updated`; ends the update that the sink opened. Keys and values are forgotten."""
        self._end_update(str(policy_version))

    # Life

    def sleep(self, *, weights: bool = False) -> int:
        """See `RolloutEngine.sleep`; on GPUs by SGLang, on CPUs by errands of `memory.py`."""
        if self._runs:
            raise EngineError(f"{WHERE}: rows are running; needs their memory; sleep once run() has returned")
        gives = (KV_CACHE,) * self._awake + (WEIGHTS,) * (weights and not self._lost_weights)
        freed = self._give_back(gives) if gives else 0
        self._awake = False
        if WEIGHTS in gives:
            self._entrance.forget()
            self._lost_weights, self._version = True, NO_VERSION
        return freed

    def wake_weights(self) -> None:
        """See `RolloutEngine.wake_weights`."""
        if self._lost_weights:
            self._team.together(lambda: self._alive.call("retake_memory", (WEIGHTS,)))
        self._lost_weights = False

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        if not self._awake:
            self._team.together(lambda: self._alive.call("retake_memory", (KV_CACHE,)))
        self._awake = True

    def check(self) -> None:
        """See `RolloutEngine.check`."""

        def raise_cause() -> None:
            if self._entrance.cause is not None:
                raise self._entrance.cause

        self._team.all(raise_cause)

    def restart(self) -> None:
        """See `RolloutEngine.restart`: new processes, which have random weights; on the main thread.

        Raises:
            EngineError: The engine did not start (with the end of its log). On all ranks; nothing of it is left.
            EngineLostError: One of its processes died or was stopped meanwhile, or it was not ready in time.
        """
        self.close()
        self._submitted = []
        self._version, self._awake, self._lost_weights = NO_VERSION, True, False
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `RolloutEngine.close`; ends the engine's processes and no others. Not collective; idempotent."""
        self._entrance.close()
        if self._host is not None:
            self._host.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _give_back(self, tags: tuple[str, ...]) -> int:
        """Bytes freed on all hosts and GPUs of the engine, on the leader; 0 on other ranks."""
        before = self._team.total(self._used_bytes())
        self._team.together(lambda: self._alive.call("release_memory", tags))
        after = self._team.total(self._used_bytes())
        return max(0, before - after) if self._team.is_leader else 0

    def _used_bytes(self) -> int:
        """By what this rank can see: its GPU, or the processes of its host if it has begun them."""
        return used_bytes(self._device, () if self._host is None else self._host.pids)

    @property
    def host_pid(self) -> int:
        """Process id of the host; on the leader, and on the first rank of another node that the engine lies on."""
        assert self._host is not None, "another rank of this node has it"
        return self._host.pid

    @property
    def _alive(self) -> HostProcess:
        assert self._host is not None, "only the leader asks, and it has started the host"
        return self._host

    def _end_update(self, version: str) -> None:
        self._team.together(lambda: self._alive.call("end_update", version))
        self._version = version
        self._entrance.end_update()

    def _check_awake(self) -> None:
        if not self._awake:
            raise EngineError(f"{WHERE}: asleep; needs the memory of keys and values; call wake() first")

    def _check_weights(self) -> None:
        if self._version == NO_VERSION or self._entrance.is_updating:
            raise EngineError(f"{WHERE}: it has no weights yet; needs a whole update; call weights_updated() first")

    def _run(self, feed: Feed | None, sampling: SamplingConfig) -> None:
        assert feed is not None, "the leader has a feed"
        self._check_weights()
        check_can_stop(sampling.stop, self._decode, where=WHERE)
        Run(
            self._alive,
            feed,
            self._ledger(sampling),
            sampling=sampling,
            eos_token_ids=self._eos_token_ids,
            max_running=self._config.max_running,
            version=self._version,
            on_progress=self._on_progress,
        ).go()

    def _ledger(self, sampling: SamplingConfig) -> Ledger:
        return Ledger(
            sampling,
            vocab_size=self._spec.vocab_size,
            kv_cache_tokens=self._config.kv_cache_tokens,
            run_seed=self._run_seed,
            policy_version=int(self._version),
            where=WHERE,
            performance=self._performance,
        )

    def _start_hosts(self, start: HostStart, nodes: Nodes) -> None:
        def begin() -> None:
            self._folder = start.folder()
            self._host = start.begin(self._folder, nodes, party, self._team)

        with parties(self._team, nodes) as party:
            self._team.on_nodes(nodes, begin)
