"""Where a run is saved, and what it takes up when it begins."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf.checkpoint.saver import Saver
from rlhf.config.run import RunConfig
from rlhf.mcore.model import MegatronModel
from rlhf.metrics.run_folder import RunFolder
from rlhf.trainers.checkpointing import Checkpoints, TrainedRole
from rlhf.trainers.site import Site, note


def make_checkpoints(
    config: RunConfig,
    roles: Sequence[TrainedRole],
    frozen: Mapping[str, MegatronModel | None],
    export: Callable[[Path], None],
    site: Site,
) -> Checkpoints:
    """The run's checkpoints; in a resume models and optimizers hold what was saved. Collective over the job.

    Called once all roles are built: what starts from the actor's weights wants those of a fresh run.
    """
    ranks = site.ranks
    everyone = tuple(range(ranks.world_size))
    own_group = ranks.groups.make([everyone], backend="gloo", purpose="checkpoint")  # for saves in the background
    checkpoints = Checkpoints(
        config,
        rank=ranks.rank,
        group=site.everyone,
        record=site.record,
        roles=roles,
        frozen=frozen,
        saver=Saver(
            RunFolder(ranks.run_folder).checkpoints,
            group=own_group,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
            asynchronous=config.checkpoint.asynchronous,
            note=lambda text: note(site, text),
            tick=lambda: ranks.progress.tick("save"),
        ),
        export=export,
        run_folder=ranks.run_folder,
        timers=site.timers,
        progress=ranks.progress,
        note=lambda text: note(site, text),
    )
    if site.resume is not None:
        ranks.progress.tick("load the checkpoint")
        checkpoints.load(site.resume)
    return checkpoints
