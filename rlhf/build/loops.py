"""A run from its config: what is checked, opened and put together, in the order in which all ranks do it."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlhf.build.checkpoints import make_checkpoints
from rlhf.build.engines import make_engine_pool, make_losses, make_recovery, make_weight_sync, start_engine
from rlhf.build.roles import make_critic, make_exporter, make_model, make_policy, spec_of_role, trained_tensors
from rlhf.config.checks import collecting
from rlhf.config.run import PPORunConfig, RunConfig, SFTRunConfig, check_world
from rlhf.data.batch import PromptBatch
from rlhf.data.prompts import AnswerSource, PromptSource, open_problems
from rlhf.data.tokenizer import check_vocabulary, eos_token_ids, load_tokenizer
from rlhf.dist.agree import gather
from rlhf.dist.job import Ranks
from rlhf.families.folder import resolve_folder
from rlhf.families.spec import Head
from rlhf.mcore.groups import make_groups
from rlhf.mcore.optimizer import build_optimizer
from rlhf.mcore.params import current_params
from rlhf.metrics.run_folder import RunFolder
from rlhf.models.calls import RoleCalls
from rlhf.preflight.inputs import check_inputs
from rlhf.reward.function import RewardFunction
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.trainers.checkpointing import TrainedRole
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.evaluation import Evaluation
from rlhf.trainers.experience import PPOModels
from rlhf.trainers.generation import Generation
from rlhf.trainers.mismatch.replay import Replays
from rlhf.trainers.mismatch.watch import MismatchWatch
from rlhf.trainers.ownership import Ownership
from rlhf.trainers.phases import Phases
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.ppo import PPOLoop
from rlhf.trainers.reporter import Reporter
from rlhf.trainers.sample_dump import SampleDump
from rlhf.trainers.scoring import Scorer
from rlhf.trainers.sft import SFTLoop, SFTState
from rlhf.trainers.site import Site, announce, note, open_site

TRAINED = ("actor", "critic")


def build_loop(config: RunConfig, ranks: Ranks) -> PPOLoop | SFTLoop:
    """This rank's part of the run. Collective over the job.

    Raises:
        ConfigError, CheckpointError, DataError, LayoutError: Something the config names cannot be used.
    """
    with collecting() as faults:
        check_world(config, ranks.world_size)
        specs = check_inputs(config, faults)
    faults.raise_any(config.name)
    site = open_site(config, ranks, {role: specs[role] for role in TRAINED if role in specs})
    with ExitStack() as until_it_runs:
        if site.desk is not None:  # loading can take minutes; the loop ends the display that begins here
            until_it_runs.enter_context(site.desk.display)
        loop = _build_ppo(config, site) if isinstance(config, PPORunConfig) else _build_sft(config, site)
        until_it_runs.pop_all()
    return loop


def _build_ppo(config: PPORunConfig, site: Site) -> PPOLoop:
    rank, folder = site.ranks.rank, resolve_folder(config.actor.model.path)
    ownership = Ownership.of(config.rollout)
    owners_group = site.ranks.groups.cpu_group([ownership.leaders])
    owner = _owner_side(config, folder, ownership, site)
    told = gather((owner.stop_ids, str(owner.prompts.report())) if owner else None, site.everyone)
    stop_ids, data_report = next(words for words in told if words is not None)
    performance = PerformanceMonitor() if owner else None
    engine_start = start_engine(config, folder, stop_ids, site, performance)

    calls = RoleCalls(rank, site.everyone, span=site.span)
    actor = make_policy("actor", config, config.actor, calls, site)
    critic = make_critic(config, calls, site, actor.model)
    reference = make_policy("reference", config, config.reference, calls, site, actor.model)
    sync = make_weight_sync(config, site)
    certificate = sync.certificate.render() if sync is not None and sync.certificate is not None else ""
    grids = {"actor": actor.groups.grid, "critic": critic.groups.grid, "reference": reference.groups.grid}
    announce(config, site, grids, certificate)
    note(site, data_report)

    scorer, export = owner.scorer if owner else None, make_exporter(config.actor, actor.model, actor.groups, site)
    roles = [
        TrainedRole("actor", actor.model, actor.optimizer),
        TrainedRole("critic", critic.model, critic.optimizer),
    ]
    checkpoints = make_checkpoints(config, roles, {"reference": reference.model}, export, site)
    losses = make_losses(config, site)
    engine = engine_start.settled(losses)
    pool = make_engine_pool(config, engine, owners_group, site)
    policy_sync = PolicySync(
        sync,
        actor_params=lambda: current_params(actor.model) if actor.model else {},
        engine=engine,
        trained=trained_tensors(config.actor),
        survives_loss=config.rollout.on_loss == "replace",
    )
    recovery = make_recovery(config, losses, engine, pool, policy_sync)
    phases = Phases(site.timers, engine, recovery, sleep=config.rollout.sleep, forget=policy_sync.forget)
    return PPOLoop(
        config=config,
        rank=rank,
        ownership=ownership,
        owners_group=owners_group,
        everyone=site.everyone,
        generation=Generation(
            config,
            rank=rank,
            ownership=ownership,
            prompts=owner.prompts if owner else None,
            pool=pool,
            performance=performance,
            timers=site.timers,
        ),
        engine=engine,
        policy_sync=policy_sync,
        recovery=recovery,
        scorer=scorer,
        models=PPOModels(actor, critic, reference),
        watch=MismatchWatch(
            config.mismatch,
            Replays(
                rank=rank,
                group=site.everyone,
                actor=actor,
                calls=calls,
                engine=engine,
                leads=owner is not None,
                policy_sync=policy_sync,
                recovery=recovery,
                awake=phases.evaluation,
                sampling=config.rollout.sampling,
            ),
            dtype=config.actor.model.dtype,
            folder=RunFolder(site.ranks.run_folder),
            note=partial(note, site),
        ),
        calls=calls,
        phases=phases,
        save=partial(export, Path(config.save_hf)) if config.save_hf else None,
        start=DriverState.from_dict(site.resume.record.state) if site.resume else DriverState.start(config),
        evaluates_first=site.resume is None or not site.resume.is_own,
        checkpoints=checkpoints,
        timers=site.timers,
        profiler=site.profiler,
        evaluation=Evaluation(
            config=config.eval,
            pool=pool,
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
    check_vocabulary(tokenizer, (end_token,), {"actor": spec_of_role(config.actor.model).vocab_size})
    groups = make_groups(config.actor.parallel, site.ranks.groups)
    model = make_model(config.actor, groups, Head.LM, site, config.seed)
    assert model is not None, "check_world leaves no rank without a role"
    announce(config, site, {"actor": groups.grid})
    answers = AnswerSource(
        open_problems(config.data, tokenizer, seed=config.seed, need_answers=True),
        tokenizer,
        batch_samples=config.sft.batch_samples,
        eos_token_id=end_token,
    )
    note(site, str(answers.report()))
    optimizer, export = build_optimizer(model, config.actor.optim), make_exporter(config.actor, model, groups, site)
    folder = RunFolder(site.ranks.run_folder).path / "hf"
    last = folder / "final" if config.checkpoint.save_hf_every else folder  # beside those of single steps
    target = Path(config.save_hf) if config.save_hf else last
    return SFTLoop(
        config=config,
        model=model,
        optimizer=optimizer,
        answers=answers,
        group=site.everyone,
        stop=site.ranks.stop,
        timers=site.timers,
        profiler=site.profiler,
        save=partial(export, target),
        save_folder=target,
        start=SFTState.from_dict(site.resume.record.state) if site.resume else SFTState(),
        checkpoints=make_checkpoints(config, [TrainedRole("actor", model, optimizer)], {}, export, site),
        desk=site.desk,
    )


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
    check_vocabulary(tokenizer, stop_ids, {role: spec_of_role(model).vocab_size for role, model in models.items()})
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
