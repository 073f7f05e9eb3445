"""By which way weights come into an engine, on one of its ranks."""

import torch
from torch.distributed import ProcessGroup

from rlhf.config.rollout import RolloutConfig
from rlhf.errors import EngineLostError
from rlhf.families.spec import ModelSpec
from rlhf.rollout.sglang.layout import Sizes
from rlhf.rollout.sglang.life.process import HostPort, HostProcess
from rlhf.rollout.sglang.team import Team
from rlhf.rollout.sglang.weights.lasting import LastingSink
from rlhf.rollout.sglang.weights.sink import SchedulerSink, check_models


class Entrance:
    """The sinks of a rank: its own, or those of all tp ranks where it is alone. Closed until `open`."""

    def __init__(
        self,
        spec: ModelSpec,
        config: RolloutConfig,
        *,
        dtype: str,
        device: torch.device,
        cpu_group: ProcessGroup | None,
        team: Team,
    ) -> None:
        self._spec, self._config, self._dtype, self._device = spec, config, dtype, device
        self._cpu_group, self._team = cpu_group, team
        self.port: HostPort | None = None
        """On the leader of an open one."""
        self._lasting: LastingSink | None = None
        self.sinks: tuple[SchedulerSink, ...] = ()
        """By tp rank."""

    def open(self, host: HostProcess | None) -> None:
        """Anew, for processes that have just started. Collective over the engine's ranks; `host`: on the leader.

        Raises:
            EngineError, LayoutError: See `check_models`. On all ranks.
        """
        self.port = None if host is None else HostPort(host)
        if self._cpu_group is not None:
            self.sinks = (self._sink(self._team.rank),)
        else:
            others = tuple(self._sink(tp_rank) for tp_rank in range(1, self._config.tp))
            self.sinks = (self._sink(0, others), *others)
        self._team.all(lambda: check_models(self.sinks))

    def params(self) -> SchedulerSink | LastingSink:
        """See `SGLangEngine.params`."""
        assert len(self.sinks) == 1, "a rank that speaks for all of the engine's has several"
        if self._config.on_loss == "stop":
            return self.sinks[0]
        self._lasting = LastingSink(self.sinks[0])
        return self._lasting

    @property
    def cause(self) -> EngineLostError | None:
        """How the engine was lost during a transfer that went to its end all the same."""
        return None if self._lasting is None else self._lasting.cause

    @property
    def is_updating(self) -> bool:
        """On the leader: an update has begun and not ended."""
        return self.port is not None and self.port.is_updating

    def end_update(self) -> None:
        """The engine has ended the update."""
        if self.port is not None:
            self.port.is_updating = False

    def forget(self) -> None:
        """The engine has given its weights back: the next transfer must bring all."""
        for sink in self.sinks:
            sink.forget()

    def close(self) -> None:
        """Idempotent."""
        for sink in self.sinks:
            sink.close()
        self._lasting = None

    def _sink(self, tp_rank: int, others: tuple[SchedulerSink, ...] = ()) -> SchedulerSink:
        away, device = tp_rank - self._team.rank, self._device
        return SchedulerSink(
            self._spec,
            Sizes(self._config.tp, self._config.sglang.ep),
            tp_rank=tp_rank,
            dtype=self._dtype,
            port=None if away else self.port,
            cpu_group=self._cpu_group,
            device=device if device.type == "cpu" else torch.device("cuda", (device.index or 0) + away),
            reply_limit_s=self._config.sglang.reply_limit_s,
            others=others,
        )
