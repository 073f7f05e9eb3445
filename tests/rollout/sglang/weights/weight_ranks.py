"""What the ranks of the tests of weights do: an actor on four, an engine on two. Imports little, for each rank pays."""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.sglang import SGLangConfig
from rlhf.data.batch import PromptBatch
from rlhf.dist.groups import GroupFactory
from rlhf.errors import EngineError, WeightSyncError
from rlhf.families.registry import hf_config
from rlhf.families.spec import ModelSpec
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.routes import Routes
from rlhf.reshard.topology import Fanout, Link, Topology
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.sglang.engine import SGLangEngine
from rlhf.rollout.sglang.layout import folded, sglang_layout
from tests.reshard.toy import filled_params, full_tensors
from tests.rollout.sglang.errands import Built, Poison
from tests.rollout.sglang.listeners import check_private

CPU = torch.device("cpu")
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=9)
SAMPLED = SamplingConfig(temperature=1.2, top_p=0.9, max_new_tokens=9)
LIMIT = timedelta(seconds=240)
CLOSE = 1e-4
"""Of log-probs: fp32 in another order, and through experts of another kernel."""


@dataclass(frozen=True)
class Answers:
    """What transformers says: greedy responses to the prompts by some weights, with their log-probs."""

    weights: Mapping[str, Tensor]
    """By the names of hub checkpoints."""
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One model, an actor and an engine."""

    spec: ModelSpec
    folder: Path
    src: ModelLayout
    dst: ModelLayout
    ep: int
    prompts: PromptBatch
    answers: tuple[Answers, Answers]
    """By first weights, and by second ones, in which only `changed` differ."""
    changed: tuple[str, ...]


class Engine:
    """This rank's part of the engine; nothing on ranks outside."""

    def __init__(self, case: Case, factory: GroupFactory, *, host: str = "") -> None:
        self._case = case
        group = factory.cpu_group([case.dst.ranks])
        self.is_mine = dist.get_rank() in case.dst.ranks
        if self.is_mine:
            tp = len(case.dst.ranks)
            self.engine = SGLangEngine(
                case.spec,
                RolloutConfig(
                    engine="sglang",
                    tp=tp,
                    first_rank=case.dst.ranks[0],
                    kv_cache_tokens=2048,
                    sglang=SGLangConfig(ep=case.ep),
                ),
                tp_group=group,
                cpu_group=group,
                device=CPU,
                dtype=torch.float32,
                run_seed=3,
                eos_token_ids=(),
                log_folder=case.folder,
                host=host,
            )

    @property
    def params(self) -> object:
        return self.engine.params() if self.is_mine else {}

    def poison(self) -> None:
        if self.is_mine:
            found = self.engine.ask_schedulers(Poison())
            assert found is None or min(found) > 10000

    def check(self, answers: Answers, version: int) -> None:
        """Its greedy tokens and log-probs are those of transformers, and of this version."""
        if not self.is_mine:
            return
        self.engine.weights_updated(version)
        leads = dist.get_rank() == self._case.dst.ranks[0]
        rollout = self.engine.generate(self._case.prompts if leads else None, GREEDY)
        if rollout is None:
            return
        assert [tuple(row.tolist()) for row in rollout.responses.rows()] == list(answers.tokens)
        for found, wanted in zip(rollout.rollout_logprobs.rows(), answers.logprobs, strict=True):
            torch.testing.assert_close(found, wanted, atol=CLOSE, rtol=0)
        assert rollout.policy_versions.values.eq(version).all()

    def draws_like_the_native_engine(self, answers: Answers) -> None:
        """Its ranks draw the same tokens as each other, and as the native engine on one rank."""
        if not self.is_mine:
            return
        leads = dist.get_rank() == self._case.dst.ranks[0]
        found = self.engine.generate(self._case.prompts if leads else None, SAMPLED)
        if found is None:
            return
        native = NativeEngine(
            self._case.spec,
            RolloutConfig(kv_cache_tokens=2048),
            tp_group=None,
            cpu_group=None,
            device=CPU,
            dtype=torch.float32,
            run_seed=3,
            eos_token_ids=(),
        )
        for one in native.layout().holdings(0):
            native.params()[one.param][one.param_box(one.box).slices] = answers.weights[one.tensor][one.box.slices]
        wanted = native.generate(self._case.prompts, SAMPLED)
        assert [row.tolist() for row in found.responses.rows()] == [row.tolist() for row in wanted.responses.rows()]
        torch.testing.assert_close(found.rollout_logprobs.values, wanted.rollout_logprobs.values, atol=CLOSE, rtol=0)


def actor_into_engine(case: Case, with_megatron: bool, builds: Iterable[Built]) -> None:
    """All that is checked with one engine."""
    torch.set_num_threads(1)
    factory = GroupFactory(device_backend="gloo", timeout=LIMIT)
    everyone = factory.cpu_group([tuple(sorted({*case.src.ranks, *case.dst.ranks}))])
    engine = Engine(case, factory)
    first, second = case.answers
    actor = _megatron(case, factory) if with_megatron else filled_params(case.src, dist.get_rank(), first.weights)
    topology = Topology.blocks(dist.get_world_size(), ranks_per_node=4)
    # What both ranks of an engine in a pool apart want, norms and so on, crosses once and is passed on.
    fanout = Fanout.NODE if with_megatron else Fanout.DIRECT
    sync = WeightSync(
        case.src, case.dst, topology=topology, group=everyone, bucket_bytes=60000, windowed=True, fanout=fanout
    )
    assert sync.certificate is not None
    try:
        refuses_to_answer(engine, case)
        if dist.get_rank() == case.dst.ranks[0]:
            check_private(engine.engine.host_pid, engine.engine._folder)
        engine.poison()
        stats = sync.update_weights(actor, engine.params)
        assert stats.moved == stats.bound == sync.certificate.bound
        assert stats.received[Link.ACROSS_NODES] == stats.far_bound == sync.certificate.far_bound
        assert not with_megatron or 0 < stats.far_bound < stats.moved
        assert 0 < stats.staged_bytes <= sync.certificate.staging_bytes <= 2 * 60000
        engine.check(first, 1)
        engine.draws_like_the_native_engine(first)
        for one in case.src.holdings(dist.get_rank()) if dist.get_rank() in case.src.ranks else ():
            actor[one.param][one.param_box(one.box).slices] = second.weights[one.tensor][one.box.slices]
        stats = sync.update_weights(actor, engine.params, changed=case.changed)
        assert 0 < stats.moved == stats.bound < sync.certificate.bound / 2
        engine.check(second, 2)
        engine.poison()  # as after a release of memory
        if engine.is_mine:
            engine.params.forget()
        stats = sync.update_weights(actor, engine.params, changed=case.changed)
        assert stats.moved == sync.certificate.bound
        engine.check(second, 3)
        if engine.is_mine:
            each_tensor_left_out(case, engine.engine)
            for build in builds:
                as_sglang_loads(build, engine.engine)
        sync.update_weights(actor, engine.params)
        engine.check(second, 4)
    finally:
        if engine.is_mine:
            engine.engine.close()


def refuses_to_answer(engine: Engine, case: Case) -> None:
    """An engine with the random weights that it started from."""
    if engine.is_mine:
        leads = dist.get_rank() == case.dst.ranks[0]
        with pytest.raises(EngineError, match="no weights yet"):
            engine.engine.generate(case.prompts if leads else None, GREEDY)
        engine.engine._submitted.clear()  # else it is answered with the first weights


def each_tensor_left_out(case: Case, engine: SGLangEngine) -> None:
    """Real schedulers notice every single tensor that does not come."""
    plan = make_plan(case.src, case.dst, Topology.blocks(dist.get_world_size(), ranks_per_node=8))
    manifest = Routes(plan, dist.get_rank(), 60000, windowed=True).route().manifest
    assert manifest is not None
    mine = {one.tensor for one in manifest.held}
    sink = engine.params()
    for tensor in case.dst.tensors:
        windows = tuple(
            replace(window, pieces=tuple(piece for piece in window.pieces if piece.move.tensor != tensor))
            for window in manifest.windows
        )
        named = f"elements of {tensor}, held in .*, do not come" if tensor in mine else ""
        try:
            if named:
                with pytest.raises(WeightSyncError, match=named):
                    sink.begin(replace(manifest, windows=windows), "float32")
            else:
                sink.begin(manifest, "float32")
        finally:
            sink.end()
        assert sink.needs_complete


def as_sglang_loads(build: Built, engine: SGLangEngine) -> None:
    """Our tables put every element where SGLang's own loader does, and leave its padding alone."""
    found = engine.ask_schedulers(build)
    if found is None:
        return
    layout = sglang_layout(build_spec(build), tp=build.tp, ep=build.ep, dp=1, first_rank=0, dtype="float32")
    what = f"{build.config['model_type']} tp {build.tp} ep {build.ep} rank {build.rank}"
    theirs = {name: param.view(folded(tuple(param.shape))) for name, param in pickle.loads(found[0]).items()}
    full = full_tensors(build.shapes)
    ours = {name: torch.full_like(param, torch.nan) for name, param in theirs.items()}
    for one in layout.holdings(build.rank):
        ours[one.param][one.param_box(one.box).slices] = full[one.tensor][one.box.slices]
    for name, param in theirs.items():
        real = ours[name].isfinite()
        assert torch.equal(ours[name][real], param[real]), f"{what}: {name}"
        # SGLang writes zeros, or nothing, into the rows beyond the vocabulary
        assert (param[~real].nan_to_num() == 0).all(), f"{what}: {name}"


def build_spec(build: Built) -> ModelSpec:
    from rlhf.families.registry import spec_of

    return spec_of(build.config, where="build")


def built(spec: ModelSpec, *, tp: int, ep: int, rank: int) -> Built:
    """With a number of its own in every element."""
    layout = sglang_layout(spec, tp=tp, ep=ep, dp=1, first_rank=0, dtype="float32")
    return Built(hf_config(spec), dict(layout.tensors), tp, ep, rank)


def _megatron(case: Case, factory: GroupFactory) -> dict[str, Tensor]:
    """A real model on the actor's ranks, whose own log-probs are those of transformers; its parameters."""
    from rlhf.config.model import ModelConfig
    from rlhf.config.parallel import ParallelConfig
    from rlhf.data.batch import Sequences
    from rlhf.data.ragged import Ragged
    from rlhf.families.spec import Head
    from rlhf.mcore.groups import make_groups
    from rlhf.mcore.load import load_weights
    from rlhf.mcore.model import build_model
    from rlhf.mcore.params import local_params
    from rlhf.mcore.score import score_logprobs

    parallel = ParallelConfig(tp=2, pp=2)
    groups = make_groups(parallel, factory)
    if not groups.is_member:
        return {}
    config = ModelConfig(path=str(case.folder))
    model = build_model(case.spec, config, parallel, groups, head=Head.LM, device=CPU, seed=1, trainable=False)
    load_weights(model, case.folder)
    answers = case.answers[0]
    rows = [
        torch.cat([prompt, torch.tensor(response)])
        for prompt, response in zip(case.prompts.tokens.rows(), answers.tokens, strict=True)
    ]
    sequences = Sequences(
        sample_ids=case.prompts.sample_ids,
        tokens=Ragged.of(rows, dtype=torch.int64),
        response_lengths=torch.tensor([len(response) for response in answers.tokens]),
    )
    scored = score_logprobs(model, sequences, microbatch_tokens=200, temperature=1.0, with_entropy=False)
    if scored is not None:
        for found, wanted in zip(scored[0].rows(), answers.logprobs, strict=True):
            torch.testing.assert_close(found, wanted, atol=CLOSE, rtol=0)
    return local_params(model)
