"""Rollout engines, and the standing transfer of the actor's weights into them."""

from functools import partial
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from rlhf.build.engine_factories import check_tail, engine_factory
from rlhf.build.engine_start import EngineStart
from rlhf.build.roles import spec_of_role
from rlhf.config.run import PPORunConfig
from rlhf.data.tokenizer import TextOf
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.quarantine import OnMismatch
from rlhf.reshard.topology import Fanout
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.pool import EnginePool, store_of_job
from rlhf.rollout.sglang.cpu import idle_on_cpu
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.recovery import Losses, Recovery
from rlhf.trainers.site import Site, note


def start_engine(
    config: PPORunConfig,
    folder: Path,
    stop_ids: tuple[int, ...],
    site: Site,
    performance: PerformanceMonitor | None = None,
) -> EngineStart:
    """This rank's part of its engine, begun. Collective over the job.

    Raises:
        EngineError: It cannot start. EngineLostError, where `rollout.on_loss` is stop. On all its ranks.
    """
    rollout, factory = config.rollout, site.ranks.groups
    sets = rollout.engines
    tp_group, cpu_group = factory.device_group(sets), factory.cpu_group(sets)
    check_tail(rollout)
    if rollout.engine == "sglang" and site.ranks.device.type == "cpu" and (idle := idle_on_cpu(rollout.sglang)):
        note(site, idle)
    survives_loss = rollout.on_loss == "replace"
    if site.ranks.rank not in rollout.ranks:
        return EngineStart(None, survives_loss=survives_loss)
    make = partial(
        engine_factory(rollout.engine),
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
        performance=performance,
        decode=TextOf(folder),
    )
    return EngineStart(make, survives_loss=survives_loss)


def make_engine_pool(
    config: PPORunConfig, engine: RolloutEngine | None, leaders_group: ProcessGroup | None, site: Site
) -> EnginePool | None:
    """All engines as one; None outside the rollout pool. `leaders_group`: gloo, on the first rank of each engine."""
    if engine is None:
        return None
    return EnginePool(
        engine,
        config.rollout,
        rank=site.ranks.rank,
        leaders_group=leaders_group,
        store=store_of_job("rollout"),
        outlives_loss=config.rollout.on_loss == "replace",
        on_wait=lambda: site.ranks.progress.tick("rollout/generate, other engines"),
    )


def make_weight_sync(config: PPORunConfig, site: Site) -> WeightSync | None:
    """From the actor's layout into the engines'; None on ranks of neither. Collective over the job."""
    spec, dtype, rollout = spec_of_role(config.actor.model), config.actor.model.dtype, config.rollout
    pools = tuple(sorted({*config.actor.parallel.ranks, *rollout.ranks}))
    group = site.ranks.groups.device_group([pools])
    if group is None:
        return None
    return WeightSync(
        megatron_layout(spec, config.actor.parallel, head=Head.LM, dtype=dtype),
        engine_factory(rollout.engine).layout_of(spec, rollout, dtype=dtype),
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


def make_losses(config: PPORunConfig, site: Site) -> Losses:
    """What is known of engines that are lost, from their first start on. Collective over the job."""
    rollout, group = config.rollout, None
    if rollout.on_loss == "replace":
        group = site.ranks.groups.cpu_group([tuple(sorted({*config.actor.parallel.ranks, *rollout.ranks}))])
    return Losses(rollout, rank=site.ranks.rank, group=group, say=partial(note, site))


def make_recovery(
    config: PPORunConfig,
    losses: Losses,
    engine: RolloutEngine | None,
    pool: EnginePool | None,
    policy_sync: PolicySync,
) -> Recovery:
    """What keeps this rank's engine at work."""
    return Recovery(
        config.rollout,
        losses=losses,
        engine=engine,
        seen_lost=lambda: None if pool is None else pool.lost,
        forget=policy_sync.forget,
    )
