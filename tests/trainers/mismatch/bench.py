"""An actor, engines and the sync between them, without the rest of a run, with new random weights for each trial."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.config.mismatch import MismatchConfig, MismatchLimits
from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import PromptBatch, PromptRecord, Rollout
from rlhf.data.ragged import Ragged
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import logical_tensors, spec_of
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import make_groups
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.load import take_weights
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.params import current_params
from rlhf.metrics.names import MismatchMetrics
from rlhf.metrics.run_folder import RunFolder
from rlhf.models.calls import RoleCalls
from rlhf.models.policy import Policy
from rlhf.reshard.topology import Topology
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.sglang.engine import SGLangEngine
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.experience import sequences_of
from rlhf.trainers.mismatch.replay import Replays
from rlhf.trainers.mismatch.watch import MismatchWatch
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.recovery import Losses, Recovery
from tests.trainers.losable import LosableEngine

CPU = torch.device("cpu")
LOSABLE = "tests.trainers.losable:LosableEngine"
COMMON = {
    "vocab_size": 67,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 160,
    "rms_norm_eps": 3e-5,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True},
    },
}


def tiny_spec(family: str) -> ModelSpec:
    return spec_of({**COMMON, **FAMILIES[family]}, where="bench")


@dataclass(frozen=True)
class Layout:
    """Who is where, on `ranks` ranks."""

    ranks: int = 1
    actor: ParallelConfig = field(default_factory=ParallelConfig)
    tp: int = 1
    """Of an engine."""
    dp: int = 1
    """Engines."""
    engine: str = "native"
    """Or sglang, of models whose MLPs it does not pad; or LOSABLE."""
    on_loss: str = "stop"


class Bench:
    """One rank's part. All its calls are made by all ranks alike."""

    def __init__(self, family: str, layout: Layout, folder: Path, *, dtype: str = "float32") -> None:
        self.spec, self.dtype, self.layout = tiny_spec(family), dtype, layout
        factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
        self.everyone = _not_none(factory.cpu_group([tuple(range(layout.ranks))]))
        self.rank, self.folder = dist.get_rank(), RunFolder(folder)
        self.calls = RoleCalls(self.rank, self.everyone)
        self.rollout = RolloutConfig(
            **{"engine": layout.engine, "on_loss": layout.on_loss, "max_losses": 20},
            **{"tp": layout.tp, "dp": layout.dp, "max_running": 7, "kv_cache_tokens": 1600},
        )
        self.actor = self._actor(factory, ModelConfig(path="bench", dtype=dtype))
        tp_group, cpu_group = (make(self.rollout.engines) for make in (factory.device_group, factory.cpu_group))
        self.engine = {"native": NativeEngine, "sglang": SGLangEngine, LOSABLE: LosableEngine}[layout.engine](
            *(self.spec, self.rollout),
            **{"tp_group": tp_group if layout.tp > 1 else None, "cpu_group": cpu_group if layout.tp > 1 else None},
            **{"device": CPU, "dtype": getattr(torch, dtype), "run_seed": 11, "eos_token_ids": ()},
            log_folder=folder,
        )
        sync = WeightSync(
            megatron_layout(self.spec, layout.actor, head=Head.LM, dtype=dtype),
            self.engine.layout(),
            topology=Topology.of_hosts(["here"] * layout.ranks),
            group=factory.device_group([tuple(range(layout.ranks))]),
            windowed=layout.engine == "sglang",
        )
        self.policy_sync = PolicySync(
            sync,
            actor_params=lambda: current_params(self.model),
            engine=self.engine,
            survives_loss=layout.on_loss == "replace",
        )
        losses = Losses(self.rollout, rank=self.rank, group=self.everyone)
        self.recovery = Recovery(self.rollout, losses=losses, engine=self.engine, forget=self.policy_sync.forget)
        self.version = 0

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(engine[0] for engine in self.rollout.engines)

    @property
    def model(self) -> MegatronModel:
        assert self.actor.model is not None
        return self.actor.model

    def randomise(self, seed: int, *, scale: float = 1.0) -> None:
        """New weights for the actor, the same in each layout; the engines get them with the next sync."""
        generator, weights = torch.Generator().manual_seed(seed), {}
        for tensor in logical_tensors(self.spec, head=Head.LM):
            drawn = torch.randn(tensor.shape, generator=generator)
            is_norm = len(tensor.shape) == 1 and "norm" in tensor.name
            weights[tensor.name] = 1 + 0.3 * drawn if is_norm else drawn * 0.2 * scale
        take_weights(self.model, lambda t, box: weights[t.name][box.slices], names=set(weights), where="bench")

    def sync(self) -> None:
        """The engines get the actor's weights as a new version."""
        self.version += 1
        self.policy_sync.update_weights(policy_version=self.version)

    def prompts(self, draw: Random, rows: int, longest: int) -> tuple[PromptBatch, tuple[int, ...]]:
        """(this rank's rows, owner of every row): leaders of engines take turns."""
        owners = tuple(self.leaders[at % len(self.leaders)] for at in range(rows))
        every = [torch.tensor([draw.randrange(67) for _ in range(draw.randint(1, longest))]) for _ in owners]
        mine = [at for at, owner in enumerate(owners) if owner == self.rank]
        batch = PromptBatch(
            sample_ids=torch.tensor(mine, dtype=torch.int64) + 1000 * self.version,
            prompt_ids=torch.tensor(mine, dtype=torch.int64),
            tokens=Ragged.of([every[at] for at in mine], dtype=torch.int64),
            records=(PromptRecord("", "", {}),) * len(mine),
        )
        return batch, owners

    def generate(self, engine: RolloutEngine, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        leads = self.rank in self.leaders
        return engine.generate(prompts if leads else None, sampling) or Rollout.empty()

    def score(self, rollout: Rollout, owners: tuple[int, ...], sampling: SamplingConfig) -> Ragged:
        """The actor's log-probs, as a step takes them."""
        actor = replace(self.actor, temperature=sampling.temperature or 1.0)
        found = actor.logprobs(sequences_of(rollout), owners=owners).collect().scores
        self.calls.flush()
        return found

    def look(
        self,
        rollout: Rollout,
        old_logprobs: Ragged,
        sampling: SamplingConfig,
        *,
        engine: RolloutEngine | None = None,
        limits: MismatchLimits | None = None,
        on_breach: str = "warn",
        replay_rows: int = 6,
        note: Callable[[str], None] = lambda _: None,
    ) -> MismatchMetrics:
        """What the watch of a step says; a verdict lies in the folder."""
        chosen = {} if limits is None else {self.dtype: limits}
        watch = MismatchWatch(
            MismatchConfig(on_breach=on_breach, replay_rows=replay_rows, **chosen),
            Replays(
                rank=self.rank,
                group=self.everyone,
                actor=replace(self.actor, temperature=sampling.temperature or 1.0),
                calls=self.calls,
                engine=engine or self.engine,
                leads=self.rank in self.leaders,
                policy_sync=self.policy_sync,
                recovery=self.recovery,
                awake=self._awake,
                sampling=sampling,
            ),
            dtype=self.dtype,
            folder=self.folder,
            note=note,
        )
        state = DriverState(seed=7, kl_coef=0.0, step=self.version - 1, policy_version=self.version)
        return watch.look(rollout, old_logprobs, state, left_out=False)

    def named(self) -> str:
        """The cause in the record of this version, on rank 0; empty elsewhere."""
        if self.rank:
            return ""
        path = self.folder.mismatch(self.version, "json")
        return str(json.loads(path.read_text())["cause"])

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self.recovery.guard(self.engine.sleep)  # as between rollout and training
        self.recovery.guard(self.engine.wake)
        yield

    def _actor(self, factory: GroupFactory, config: ModelConfig) -> Policy:
        groups = make_groups(self.layout.actor, factory)
        model = build_model(
            *(self.spec, config, self.layout.actor, groups),
            **{"head": Head.LM, "device": CPU, "seed": 1, "trainable": False},
        )
        return Policy(
            name="actor",
            groups=groups,
            model=model,
            optimizer=None,
            calls=self.calls,
            temperature=1.0,
            microbatch_tokens=96,
            phase=lambda _: nullcontext(),
            tick=lambda _: None,
        )


def _not_none(group: ProcessGroup | None) -> ProcessGroup:
    assert group is not None
    return group


def shifted(values: Ragged, by: int) -> Ragged:
    """Each row's values moved by some places; the ends repeat."""
    rows: list[Tensor] = []
    for row in values.rows():
        places = (torch.arange(len(row)) + by).clamp(0, len(row) - 1)
        rows.append(row[places])
    return Ragged.of(rows, dtype=torch.float32)
