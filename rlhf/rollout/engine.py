"""What the trainer asks of a rollout engine. Knows no engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import PromptBatch, Rollout
from rlhf.families.spec import ModelSpec
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.windows import WindowSink
from rlhf.rollout.feed import Feed
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.stopping import Decode

ProgressFn = Callable[[int, int], None]
"""Called as (responses finished, responses taken) again and again while an engine works, on each of its ranks; as
(0, 0) while it starts."""


class RolloutEngine(Protocol):
    """One rank's part of one engine; an engine is a tensor-parallel group of ranks, its leader is tp rank 0.

    Every method is called by all ranks of the engine in the same order; those that communicate do so over that group
    only. Rows go in and out on the leader; other ranks pass None and get None.
    """

    def run(self, feed: Feed | None, sampling: SamplingConfig) -> None:
        """Answer what a feed hands in, row by row as it ends, until it says otherwise. Collective over the engine.

        feed: On the leader; None elsewhere. `sampling` is equal on all ranks of the engine.

        A sample's tokens are a function of the weights, its prompt, `sampling` and `sample_seed(run seed, sample id,
        attempt)`, and of nothing else: not of the rest of the batch, nor of the engine's size. Its random numbers go by
        the place in the response, so that a response that was begun goes on as if it had never been interrupted.

        Raises:
            EngineError: On all ranks. A row is empty, holds a token outside the vocabulary, or can never fit into the
                engine's memory (named by its sample id); the engine is asleep or has no weights. Rows that had not
                ended are given up, and the engine can be used again.
        """
        ...

    def submit(self, prompts: PromptBatch | None, sampling: SamplingConfig, *, attempt: int = 0) -> None:
        """Queue one response for each row. `sampling` and `attempt` are equal on all ranks of the engine.

        Raises:
            EngineError: A row is empty, holds a token outside the vocabulary, or can never fit into the engine's
                memory. On all ranks; nothing is queued.
        """
        ...

    def collect(self) -> Rollout | None:
        """Responses to all rows submitted since the last collect, in their order: `run` over a feed of these rows."""
        ...

    def generate(self, prompts: PromptBatch | None, sampling: SamplingConfig, *, attempt: int = 0) -> Rollout | None:
        """`submit` and `collect` in one."""
        ...

    def layout(self) -> ModelLayout:
        """What each rank of the whole rollout pool (all engines) holds in its `params`. Pure."""
        ...

    def params(self) -> dict[str, Tensor] | WindowSink:
        """This rank's weights by the names of `layout`. They may be written to between calls, in place.

        An engine whose weights another process holds gives the door to it.
        """
        ...

    def weights_updated(self, policy_version: int) -> None:
        """The weights in `params` were replaced and have this version from now on."""
        ...

    def sleep(self, *, weights: bool = False) -> int:
        """Give back the memory of keys and values, and of the weights if asked; what sleeps already stays asleep.

        Returns the bytes given back: on each rank those of its own tensors, or on the leader all that the engine's
        processes use less. Weights are lost: before the next answer `wake_weights` and a complete update must come.

        Raises:
            EngineError: Rows are running. On all ranks.
        """
        ...

    def wake_weights(self) -> None:
        """Take the memory of the weights again; they are zeros until they are updated. Before the update."""
        ...

    def wake(self) -> None:
        """Take the memory of keys and values again. After the update; an engine is made awake."""
        ...

    def check(self) -> None:
        """Raise EngineLostError, on all ranks, where one of them lost the engine in an update that raised elsewhere."""
        ...

    def restart(self) -> None:
        """After an EngineLostError: end what is left of it and start it anew, awake, without weights and without rows.

        On all ranks of the engine, each on its main thread. Engines that cannot be lost do nothing.
        """
        ...

    def close(self) -> None:
        """End the engine; nothing but `close` may be called after it."""
        ...


class EngineFactory(Protocol):
    """What `rollout.engine` names, usually a class: makes this rank's part of one engine, on all ranks of the pool."""

    continues: bool
    """Whether its engines go on with responses that were begun (`Work.begun`); asked for by rollout.tail = continue."""

    def __call__(
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
    ) -> RolloutEngine:
        """Args beyond the config.

        tp_group: ranks of this engine, for tensors on the device; None when the engine is one rank.
        cpu_group: the same ranks, for tensors in host memory (gloo).
        eos_token_ids: the model's own end-of-sequence tokens; they end a response like `stop_token_ids` do.
        log_folder: where an engine with processes of its own writes their logs.
        performance: told on the engine's leader when each row was handed in, began, had its first token and ended, by
            sample id; None: nobody asks.
        decode: text of token ids, for `sampling.stop`; called where responses grow, maybe in another process. Without
            it, rows with stop strings are refused.
        """
        ...

    def layout_of(self, spec: ModelSpec, config: RolloutConfig, *, dtype: str) -> ModelLayout:
        """What `layout` of the engines will say. Pure; also called on ranks outside the rollout pool."""
        ...
