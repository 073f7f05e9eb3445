"""What every loop stands on: the ranks of the job, a clock, and on rank 0 a desk to write to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch.distributed import ProcessGroup

from rlhf.config.load import to_yaml
from rlhf.config.run import PPORunConfig, RunConfig
from rlhf.data.fingerprint import fingerprint, tokenizer_hash
from rlhf.dist.agree import first_does, gather
from rlhf.dist.grid import Grid
from rlhf.dist.job import Ranks
from rlhf.families.folder import resolve_folder
from rlhf.families.spec import ModelSpec
from rlhf.metrics.console import ProgressDisplay, open_display
from rlhf.metrics.earlier import EarlierPart
from rlhf.metrics.run_folder import RunFolder
from rlhf.metrics.sinks import JsonlSink, MetricSink, SinkSet, TensorBoardSink, WandbSink
from rlhf.metrics.startup import RankRow, startup_table
from rlhf.metrics.timers import SpanFn, Timers, no_span
from rlhf.metrics.tracker_record import TrackerRecord
from rlhf.reshard.topology import Topology
from rlhf.trainers.profiler import StepProfiler
from rlhf.trainers.reporter import Desk
from rlhf.trainers.resume_point import ResumePoint, find_resume
from rlhf.trainers.run_record import RunRecord


@dataclass(frozen=True, slots=True)
class Site:
    """What every part of a run is built on."""

    ranks: Ranks
    everyone: ProcessGroup
    """gloo, over all ranks of the job."""
    topology: Topology
    timers: Timers
    span: SpanFn
    """Of the timers where a step is to be looked at closely; else it records nothing."""
    profiler: StepProfiler
    desk: Desk | None
    """On rank 0."""
    record: RunRecord
    """The run before its first step."""
    resume: ResumePoint | None
    """What it goes on from."""


def open_site(config: RunConfig, ranks: Ranks, models: Mapping[str, ModelSpec]) -> Site:
    """The site of a run; rank 0 makes its folder or, in a resume, goes on in it. Collective over the job.

    `models`: specs of the trained roles.

    Raises:
        ConfigError: The run folder or a tracker cannot be used.
        CheckpointError: A checkpoint is there that this run cannot go on from.
        DataError: The file of prompts cannot be read.
    """
    everyone = ranks.groups.cpu_group([tuple(range(ranks.world_size))])
    assert everyone is not None, "every rank is in the group of all ranks"
    display = None
    if ranks.rank == 0:
        display = open_display(config.log.console, config.num_steps, progress=ranks.progress)

    def on_enter(phase: str) -> None:
        ranks.progress.tick(phase)
        if display is not None:
            display.enter(phase)

    record = RunRecord.of(
        config,
        world_size=ranks.world_size,
        data=first_does(lambda: _data_record(config), everyone),
        models=models,
    )
    say = display.note if display is not None else lambda _: None
    resume = find_resume(
        config.checkpoint.resume,
        record,
        run_folder=ranks.run_folder,
        group=everyone,
        note=say,
        tick=lambda: ranks.progress.tick("look for a checkpoint"),
    )
    if resume is not None:
        first_does(lambda: resume.settle(note=say), everyone)
    resume_step = resume.record.step if resume is not None and resume.is_own else None
    desk = _desk(config, display, ranks, resume_step=resume_step) if display is not None else None
    timers = Timers(on_enter=on_enter)
    profiler = StepProfiler(
        config.profile,
        timers=timers,
        group=everyone,
        host=ranks.host,
        device=ranks.device,
        folder=RunFolder(ranks.run_folder),
    )
    return Site(
        ranks=ranks,
        everyone=everyone,
        topology=Topology.of_hosts(gather(ranks.host, everyone)),
        timers=timers,
        span=timers.span if config.profile.steps else no_span,
        profiler=profiler,
        desk=desk,
        record=record,
        resume=resume,
    )


def _data_record(config: RunConfig) -> dict[str, object]:
    """What the prompts and their tokens are known by."""
    tokenizer = tokenizer_hash(resolve_folder(config.actor.model.path), with_template=config.data.chat_template)
    return {**fingerprint(config.data, seed=config.seed).to_dict(), "tokenizer": tokenizer}


def _desk(config: RunConfig, display: ProgressDisplay, ranks: Ranks, *, resume_step: int | None) -> Desk:
    """`resume_step`: after which this run's own folder goes on; None for a run that begins."""
    folder = RunFolder.open(ranks.run_folder, to_yaml(config), resume_step=resume_step)
    display.goes_on(resume_step or 0)
    sinks: list[MetricSink] = [JsonlSink(folder.metrics), display]
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(folder.tensorboard, resume_step=resume_step))
    if config.log.wandb:
        sinks.append(
            WandbSink(
                folder.path,
                record=TrackerRecord(folder.tracker),
                project=config.log.wandb_project,
                name=config.name,
                config=asdict(config),
                online=ranks.wandb_online,
            )
        )
    return Desk(folder, SinkSet(sinks, on_failure=display.note), display, earlier=EarlierPart.read(folder, resume_step))


def announce(config: RunConfig, site: Site, roles: Mapping[str, Grid], certificate: str = "") -> None:
    """Who is where, on rank 0's console. Collective over the job."""
    mine = {name: grid.coords(site.ranks.rank) for name, grid in roles.items() if site.ranks.rank in grid.ranks}
    if isinstance(config, PPORunConfig) and site.ranks.rank in config.rollout.ranks:
        engines = enumerate(config.rollout.engines)
        number, ranks = next((number, ranks) for number, ranks in engines if site.ranks.rank in ranks)
        mine["rollout"] = {"engine": number, "tp": ranks.index(site.ranks.rank)}
    row = RankRow(rank=site.ranks.rank, host=site.ranks.host, device=str(site.ranks.device), roles=mine)
    rows = gather(row, site.everyone)
    if site.desk is not None:
        site.desk.display.note(startup_table(rows))
    note_once(site, certificate)


def note_once(site: Site, text: str) -> None:
    """What any rank says, once, on rank 0's console; the others say "". Collective over the job."""
    for said in dict.fromkeys(gather(text, site.everyone)):
        if said:
            note(site, said)


def note(site: Site, text: str) -> None:
    """A message on rank 0's console; nothing elsewhere."""
    if site.desk is not None:
        site.desk.display.note(text)
