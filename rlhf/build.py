"""The composition root: the one file that names every class and puts a run together from its config.

Every rank builds its own part, in the same order, since process groups are made on the way.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from rlhf.checkpoint.hf_export import export_hf
from rlhf.config.checks import collecting
from rlhf.config.model import FrozenRoleConfig, ModelConfig, TrainedRoleConfig
from rlhf.config.run import PPORunConfig, RunConfig, SFTRunConfig, check_world
from rlhf.data.batch import PromptBatch
from rlhf.data.prompts import AnswerSource, PromptSource, open_problems
from rlhf.data.tokenizer import check_vocabulary, eos_token_ids, load_tokenizer
from rlhf.dist.agree import gather
from rlhf.dist.job import Ranks
from rlhf.errors import ConfigError
from rlhf.families.folder import resolve_folder
from rlhf.families.frozen import changing_tensors, frozen_tensors
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import ModelGroups, make_groups
from rlhf.mcore.layout import current_params, megatron_layout
from rlhf.mcore.load import set_weights
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.optimizer import build_optimizer
from rlhf.mcore.transfer import Placed, transfer_layouts, transfer_weights
from rlhf.metrics.run_folder import RunFolder
from rlhf.models.calls import RoleCalls
from rlhf.models.critic import Critic
from rlhf.models.policy import Policy
from rlhf.preflight.inputs import check_inputs
from rlhf.reshard.quarantine import OnMismatch
from rlhf.reshard.topology import Fanout
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync
from rlhf.reward.function import RewardFunction
from rlhf.rollout.engine import EngineFactory, RolloutEngine
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.sglang.engine import SGLangEngine
from rlhf.trainers.evaluation import Evaluation
from rlhf.trainers.experience import PPOModels
from rlhf.trainers.ownership import Ownership
from rlhf.trainers.phases import Phases
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.ppo import PPOLoop
from rlhf.trainers.reporter import Reporter
from rlhf.trainers.sample_dump import SampleDump
from rlhf.trainers.scoring import Scorer
from rlhf.trainers.sft import SFTLoop
from rlhf.trainers.site import Site, announce, note, note_once, open_site


def build_loop(config: RunConfig, ranks: Ranks) -> PPOLoop | SFTLoop:
    """This rank's part of the run. Collective over the job.

    Raises:
        ConfigError, CheckpointError, DataError, LayoutError: Something the config names cannot be used.
    """
    with collecting() as faults:
        check_world(config, ranks.world_size)
        check_inputs(config, faults)
    faults.raise_any(config.name)
    site = open_site(config, ranks)
    with ExitStack() as until_it_runs:
        if site.desk is not None:  # loading can take minutes; the loop ends the display that begins here
            until_it_runs.enter_context(site.desk.display)
        loop = _build_ppo(config, site) if isinstance(config, PPORunConfig) else _build_sft(config, site)
        until_it_runs.pop_all()
    return loop


# Models


def _spec(model: ModelConfig) -> ModelSpec:
    return read_spec(resolve_folder(model.path))


def _model(
    role: TrainedRoleConfig | FrozenRoleConfig, groups: ModelGroups, head: Head, site: Site, seed: int
) -> MegatronModel | None:
    """The role's model, with its weights unless they are the actor's; None outside its pool."""
    if not groups.is_member:
        return None
    site.ranks.progress.tick(f"load {role.model.path}")
    spec = _spec(role.model)
    patterns = role.freeze if isinstance(role, TrainedRoleConfig) else ()
    model = build_model(
        spec,
        role.model,
        role.parallel,
        groups,
        head=head,
        device=site.ranks.device,
        seed=seed,
        trainable=isinstance(role, TrainedRoleConfig),
        frozen=frozen_tensors(spec, patterns, head=head, where="freeze"),
        overlap_grad_reduce=isinstance(role, TrainedRoleConfig) and role.optim.overlap_grad_reduce,
        overlap_param_gather=isinstance(role, TrainedRoleConfig) and role.optim.overlap_param_gather,
        span=site.span,
    )
    if role.model.init != "actor":
        set_weights(model, role.model)
    return model


def _trained(actor: TrainedRoleConfig) -> frozenset[str] | None:
    """Tensors that training can change; None: all of them."""
    if not actor.freeze:
        return None
    return changing_tensors(_spec(actor.model), actor.freeze, head=Head.LM, where="actor.freeze")


def _placed(name: str, role: TrainedRoleConfig | FrozenRoleConfig, head: Head) -> Placed:
    return Placed(name=name, spec=_spec(role.model), parallel=role.parallel, head=head, dtype=role.model.dtype)


def _inherit(
    name: str,
    config: PPORunConfig,
    role: TrainedRoleConfig | FrozenRoleConfig,
    actor: MegatronModel | None,
    model: MegatronModel | None,
    head: Head,
    site: Site,
) -> None:
    """Fill a role's new model from the actor's, where its config says so. Collective over the job."""
    if role.model.init != "actor":
        return
    group = site.ranks.groups.device_group([tuple(sorted({*config.actor.parallel.ranks, *role.parallel.ranks}))])
    text = ""
    if group is not None:
        site.ranks.progress.tick(f"{name} from the actor")
        certificate = transfer_weights(
            transfer_layouts(_placed("actor", config.actor, Head.LM), _placed(name, role, head)),
            actor,
            model,
            topology=site.topology,
            group=group,
            device=site.ranks.device,
            bucket_bytes=config.sync.bucket_bytes,
        )
        text = f"{name} from the actor: {certificate.render()}"
    note_once(site, text)


def _policy(
    name: str,
    config: PPORunConfig,
    role: TrainedRoleConfig | FrozenRoleConfig,
    calls: RoleCalls,
    site: Site,
    actor: MegatronModel | None = None,
) -> Policy:
    groups = make_groups(role.parallel, site.ranks.groups)
    model = _model(role, groups, Head.LM, site, config.seed)
    _inherit(name, config, role, actor, model, Head.LM, site)
    optimizer = build_optimizer(model, role.optim) if model and isinstance(role, TrainedRoleConfig) else None
    return Policy(
        name=name,
        groups=groups,
        model=model,
        optimizer=optimizer,
        calls=calls,
        temperature=config.rollout.sampling.temperature,
        microbatch_tokens=role.microbatch_tokens,
        phase=site.timers.phase,
        tick=site.ranks.progress.tick,
    )


def _critic(config: PPORunConfig, calls: RoleCalls, site: Site, actor: MegatronModel | None) -> Critic:
    groups = make_groups(config.critic.parallel, site.ranks.groups)
    model = _model(config.critic, groups, Head.VALUE, site, config.seed)
    _inherit("critic", config, config.critic, actor, model, Head.VALUE, site)
    return Critic(
        groups=groups,
        model=model,
        optimizer=build_optimizer(model, config.critic.optim) if model else None,
        calls=calls,
        microbatch_tokens=config.critic.microbatch_tokens,
        phase=site.timers.phase,
        tick=site.ranks.progress.tick,
    )


def _saver(
    role: TrainedRoleConfig, model: MegatronModel | None, groups: ModelGroups, target: Path, site: Site
) -> Callable[[], None]:
    """Writes a model as a Hugging Face checkpoint. What it gives is collective over the model's pool."""

    def save() -> None:
        if model is None:
            return
        export_hf(
            model.spec,
            megatron_layout(model.spec, role.parallel, head=model.head, dtype=role.model.dtype),
            current_params(model),
            target,
            head=model.head,
            source_folder=resolve_folder(role.model.path),
            group=groups.cpu,
            topology=site.topology,
            overwrite=True,
        )

    return save


# Rollout


ENGINES: Mapping[str, EngineFactory] = {"native": NativeEngine, "sglang": SGLangEngine}


def _engine_factory(name: str) -> EngineFactory:
    if name in ENGINES:
        return ENGINES[name]
    module, _, attribute = name.partition(":")
    try:
        return cast(EngineFactory, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"rollout.engine: {name} cannot be loaded ({error}); needs package.module:factory; change it"
        ) from error


def _engine(config: PPORunConfig, folder: Path, stop_ids: tuple[int, ...], site: Site) -> RolloutEngine | None:
    """This rank's part of its engine; None outside the rollout pool. Collective over the job."""
    rollout, factory = config.rollout, site.ranks.groups
    sets = rollout.engines
    tp_group, cpu_group = factory.device_group(sets), factory.cpu_group(sets)
    if site.ranks.rank not in rollout.ranks:
        return None
    return _engine_factory(rollout.engine)(
        read_spec(folder),
        rollout,
        tp_group=tp_group if rollout.tp > 1 else None,
        cpu_group=cpu_group if rollout.tp > 1 else None,
        device=site.ranks.device,
        dtype=getattr(torch, config.actor.model.dtype),
        run_seed=config.seed,
        eos_token_ids=stop_ids,
        on_progress=lambda done, total: site.ranks.progress.tick(
            f"rollout/generate {done}/{total}" if total else "start the engine"
        ),
        log_folder=site.ranks.run_folder / "logs",
    )


def _weight_sync(config: PPORunConfig, site: Site) -> WeightSync | None:
    """From the actor's layout into the engines'; None on ranks of neither. Collective over the job."""
    spec, dtype, rollout = _spec(config.actor.model), config.actor.model.dtype, config.rollout
    pools = tuple(sorted({*config.actor.parallel.ranks, *rollout.ranks}))
    group = site.ranks.groups.device_group([pools])
    if group is None:
        return None
    return WeightSync(
        megatron_layout(spec, config.actor.parallel, head=Head.LM, dtype=dtype),
        _engine_factory(rollout.engine).layout_of(spec, rollout, dtype=dtype),
        topology=site.topology,
        group=group,
        device=site.ranks.device,
        bucket_bytes=config.sync.bucket_bytes,
        windowed=rollout.engine == "sglang",
        fanout=Fanout(config.sync.fanout),
        near=config.sync.near,
        verify=Verify(config.sync.verify),
        on_mismatch=OnMismatch(config.sync.on_mismatch),
        engines=rollout.engines,
        span=site.span,
    )


# Loops


@dataclass(frozen=True, slots=True)
class OwnerSide:
    """What only ranks that own rows need: prompts in, text and scores out."""

    prompts: PromptSource
    held_out: PromptBatch
    scorer: Scorer
    stop_ids: tuple[int, ...]
    """Token ids that end a response."""


def _owner_side(config: PPORunConfig, folder: Path, ownership: Ownership, site: Site) -> OwnerSide | None:
    """None on ranks that own no rows."""
    index = ownership.engine_led_by(site.ranks.rank)
    if index is None:
        return None
    tokenizer = load_tokenizer(folder)
    stop_ids = eos_token_ids(tokenizer, folder)
    models = {"actor": config.actor.model, "critic": config.critic.model, "reference": config.reference.model}
    check_vocabulary(tokenizer, stop_ids, {role: _spec(model).vocab_size for role, model in models.items()})
    prompts = PromptSource(
        open_problems(config.data, tokenizer, seed=config.seed),
        prompts_per_step=config.ppo.prompts_per_step,
        samples_per_prompt=config.ppo.samples_per_prompt,
    )
    log_path = site.ranks.run_folder / "logs" / f"reward_{site.ranks.rank}.log"
    return OwnerSide(
        prompts=prompts,
        held_out=prompts.held_out(index, len(ownership.leaders), samples=config.eval.samples_per_prompt),
        scorer=Scorer(RewardFunction(config.reward, log_path=log_path), tokenizer, site.ranks.progress),
        stop_ids=stop_ids,
    )


def _build_ppo(config: PPORunConfig, site: Site) -> PPOLoop:
    rank, folder = site.ranks.rank, resolve_folder(config.actor.model.path)
    ownership = Ownership.of(config.rollout)
    owners_group = site.ranks.groups.cpu_group([ownership.leaders])
    owner = _owner_side(config, folder, ownership, site)
    told = gather((owner.stop_ids, str(owner.prompts.report())) if owner else None, site.everyone)
    stop_ids, data_report = next(words for words in told if words is not None)
    engine = _engine(config, folder, stop_ids, site)

    calls = RoleCalls(rank, site.everyone, span=site.span)
    actor = _policy("actor", config, config.actor, calls, site)
    critic = _critic(config, calls, site, actor.model)
    reference = _policy("reference", config, config.reference, calls, site, actor.model)
    sync = _weight_sync(config, site)
    certificate = sync.certificate.render() if sync is not None and sync.certificate is not None else ""
    roles = {"actor": actor.groups.grid, "critic": critic.groups.grid, "reference": reference.groups.grid}
    announce(config, site, roles, certificate)
    note(site, data_report)

    scorer = owner.scorer if owner else None
    return PPOLoop(
        config=config,
        rank=rank,
        ownership=ownership,
        owners_group=owners_group,
        everyone=site.everyone,
        prompts=owner.prompts if owner else None,
        engine=engine,
        policy_sync=PolicySync(
            sync,
            actor_params=lambda: current_params(actor.model) if actor.model else {},
            engine=engine,
            trained=_trained(config.actor),
        ),
        scorer=scorer,
        models=PPOModels(actor, critic, reference),
        calls=calls,
        phases=Phases(site.timers, engine),
        save=_saver(config.actor, actor.model, actor.groups, Path(config.save_hf), site) if config.save_hf else None,
        timers=site.timers,
        profiler=site.profiler,
        evaluation=Evaluation(
            config=config.eval,
            engine=engine,
            prompts=owner.held_out if owner else PromptBatch.empty(),
            scorer=scorer,
            group=site.everyone,
        ),
        reporter=Reporter(
            config,
            rank=rank,
            group=site.everyone,
            timers=site.timers,
            stop=site.ranks.stop,
            scorer=scorer,
            desk=site.desk,
        ),
        sample_dump=SampleDump(
            config.log.samples_every_steps,
            rank=rank,
            group=site.everyone,
            scorer=scorer,
            folder=RunFolder(site.ranks.run_folder),
            on_failure=lambda text: note(site, text),
        ),
    )


def _build_sft(config: SFTRunConfig, site: Site) -> SFTLoop:
    source = resolve_folder(config.actor.model.path)
    tokenizer = load_tokenizer(source)
    end_token = eos_token_ids(tokenizer, source)[0]
    check_vocabulary(tokenizer, (end_token,), {"actor": _spec(config.actor.model).vocab_size})
    groups = make_groups(config.actor.parallel, site.ranks.groups)
    model = _model(config.actor, groups, Head.LM, site, config.seed)
    assert model is not None, "check_world leaves no rank without a role"
    announce(config, site, {"actor": groups.grid})
    answers = AnswerSource(
        open_problems(config.data, tokenizer, seed=config.seed, need_answers=True),
        tokenizer,
        batch_samples=config.sft.batch_samples,
        eos_token_id=end_token,
    )
    note(site, str(answers.report()))
    target = Path(config.save_hf) if config.save_hf else site.ranks.run_folder / "hf"
    return SFTLoop(
        config=config,
        model=model,
        optimizer=build_optimizer(model, config.actor.optim),
        answers=answers,
        group=site.everyone,
        stop=site.ranks.stop,
        timers=site.timers,
        profiler=site.profiler,
        save=_saver(config.actor, model, groups, target, site),
        save_folder=target,
        desk=site.desk,
    )
