"""`python -m rlhf.train CONFIG --check`: a job looked at from a login node. No GPU, no process group, no run folder."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from rlhf.config.checks import Faults, collecting, noted, refuse
from rlhf.config.load import read_config
from rlhf.config.rollout import BUILT_IN
from rlhf.config.run import PPORunConfig, RunConfig, check_world
from rlhf.dist.exit_record import ExitCode
from rlhf.errors import ConfigError
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.preflight.inputs import check_inputs, roles_of
from rlhf.preflight.lengths import guess_lengths, lengths_notes, read_lengths
from rlhf.preflight.text import table
from rlhf.preflight.world import pools_are_known
from rlhf.reshard.topology import Topology
from rlhf.rollout.sglang.cpu import idle_on_cpu

if TYPE_CHECKING:
    from rlhf.preflight.roles import ModelRole

EXAMPLES = """\
examples:
  python -m rlhf.train configs/llama3_70b/ppo.yaml --check --world-size 128 --gpus-per-node 8 --gpu-memory 80
  python -m rlhf.train configs/qwen3_8b/ppo.yaml data.path=train.jsonl --check --lengths 256:40,1024:40,4096:20
  python -m rlhf.train configs/debug/ppo_tiny.yaml --check --lengths runs/ppo_tiny/samples.jsonl

Exit code 0 when the run could start, 2 when anything is wrong; everything that is wrong is told at once. A model by hub
id that is not in the local cache is looked at by its published shapes, where they are known here.
"""


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    args = _parser().parse_intermixed_args(argv)
    try:
        config, faults = read_config(args.config)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.BAD_INPUT)
    try:
        with collecting(faults):
            for part in report(config, faults, args):
                sys.stdout.write(f"{part}\n\n")
    finally:  # whatever stops the report, what was found wrong is told
        _tell(faults)
    if faults.found:
        return int(ExitCode.BAD_INPUT)
    sys.stdout.write("check: nothing wrong\n")
    return 0


def _tell(faults: Faults) -> None:
    if not (count := len(faults.found)):
        return
    lines = [f"check: {count} {'thing is' if count == 1 else 'things are'} wrong:"]
    sys.stdout.flush()
    sys.stderr.write("\n  ".join([*lines, *(fault.message for fault in faults.found)]) + "\n")


def report(config: RunConfig, faults: Faults, args: argparse.Namespace) -> Iterator[str]:
    """The parts of the report that can be made; faults are noted. Iterate over it under `collecting(faults)`."""
    world = _world_size(config, args) if pools_are_known(faults) else 0
    missing: dict[str, list[str]] = {}
    specs = check_inputs(config, faults, on_published=lambda role, hub_id: missing.setdefault(hub_id, []).append(role))
    notes = [
        f"{', '.join(f'{role}.model.path' for role in of)}: {hub_id} is not in the local cache and is looked at by its "
        f"published shapes; a run needs the checkpoint itself: `hf download {hub_id}`"
        for hub_id, of in missing.items()
    ]
    if isinstance(config, PPORunConfig) and config.rollout.engine == "sglang" and config.job.device == "cpu":
        notes += filter(None, [idle_on_cpu(config.rollout.sglang)])
    if specs:
        yield _models(config, specs)
    if world:
        yield from _parts_of_job(config, specs, faults, notes, args, world)
    if notes:
        yield "\n".join(["notes", *(f"  - {note}" for note in notes)])


def _world_size(config: RunConfig, args: argparse.Namespace) -> int:
    """As given, or as many ranks as the pools need; refused where they do not fit it, or it the nodes."""
    world: int = args.world_size or max(ranks.stop for ranks in config.pools().values())
    check_world(config, world)
    if world > args.gpus_per_node and world % args.gpus_per_node:
        refuse(
            f"--gpus-per-node: {world} ranks on nodes of {args.gpus_per_node}; needs nodes that are alike; "
            "change it or --world-size"
        )
    return world


def _models(config: RunConfig, specs: dict[str, ModelSpec]) -> str:
    rows = [["role", "model", "parameters", "dtype"]]
    for name, spec in specs.items():
        model = roles_of(config)[name].model
        tensors = logical_tensors(spec, head=Head.VALUE if name == "critic" else Head.LM)
        rows.append([name, model.path, f"{sum(prod(one.shape) for one in tensors):,}", model.dtype])
    return "\n".join(["models", *table(rows)])


def _parts_of_job(
    config: RunConfig,
    specs: dict[str, ModelSpec],
    faults: Faults,
    notes: list[str],
    args: argparse.Namespace,
    world: int,
) -> Iterator[str]:
    # Only here: Megatron-Core takes seconds to import, and faults of a config need not wait for it.
    from rlhf.preflight import memory, placement, roles  # noqa: PLC0415

    where = {"world_size": world, "gpus_per_node": args.gpus_per_node}
    grids = roles.grids_of(config)
    yield placement.render_placement(grids, roles.cuts_of(config), **where)
    notes += placement.placement_notes(grids, **where)
    if isinstance(config, PPORunConfig) and config.rollout.engine == "sglang":
        with noted():
            placement.check_engine_nodes(config.rollout, gpus_per_node=args.gpus_per_node)
    sound = {
        name: spec
        for name, spec in specs.items()
        if not faults.doubts(rf"{name}(\.(parallel(\..*)?|model(\..*)?|microbatch_tokens|freeze))?")
    }
    engine_is_known = _has_engine_of_ours(config) and not faults.doubts(
        r"rollout(\.(tp|dp|kv_cache_tokens|engine|sglang(\..*)?))?|sync(\..*)?"
    )
    if held := memory.holdings(config, sound, with_engine=engine_is_known):
        yield memory.render_memory(held)
        known = {one.role for one in held}
        notes += [f"memory: {name} is not known and not in the sums" for name in grids if name not in known]
        if args.gpu_memory:
            staging = 2 * config.sync.bucket_bytes if isinstance(config, PPORunConfig) else 0
            notes += memory.check_fits(held, gpu_memory_gib=args.gpu_memory, staging_bytes=staging)
    yield from _checkpoint(config, roles.model_roles(config, sound))
    if isinstance(config, PPORunConfig) and engine_is_known and "actor" in sound:
        yield from _sync(config, sound["actor"], args.gpus_per_node)
    if isinstance(config, PPORunConfig):
        yield from _start(config, roles.model_roles(config, sound), args.gpus_per_node)
    if isinstance(config, PPORunConfig) and not _has_engine_of_ours(config):
        notes.append(
            f"rollout.engine: {config.rollout.engine} is not asked; its memory and the sync into it are not here"
        )
    if not faults.doubts(
        r"ppo(\.(prompts_per_step|samples_per_prompt|minibatch_samples))?|sft(\.batch_samples)?|seed|"
        r"data(\.max_prompt_tokens)?|rollout(\.sampling(\.max_new_tokens)?)?"
    ):
        yield from _microbatches(config, roles.model_roles(config, sound), notes, args.lengths)


def _has_engine_of_ours(config: RunConfig) -> bool:
    return isinstance(config, PPORunConfig) and config.rollout.engine in BUILT_IN


def _checkpoint(config: RunConfig, models: "list[ModelRole]") -> Iterator[str]:
    from rlhf.preflight.checkpoint import render_checkpoint, saved_bytes  # noqa: PLC0415

    with noted():
        if saved := saved_bytes(models):
            yield render_checkpoint(saved, config.checkpoint)


def _sync(config: PPORunConfig, spec: ModelSpec, gpus_per_node: int) -> list[str]:
    from rlhf.preflight.sync import render_sync, sync_certificate  # noqa: PLC0415

    ranks = max(ranks.stop for ranks in config.pools().values())
    with noted():
        topology = Topology.blocks(ranks, ranks_per_node=gpus_per_node)
        return [render_sync(sync_certificate(config, spec, topology))]
    return []


def _start(config: PPORunConfig, models: "list[ModelRole]", gpus_per_node: int) -> Iterator[str]:
    from rlhf.preflight.sync import render_sync, start_certificates  # noqa: PLC0415

    ranks = max(ranks.stop for ranks in config.pools().values())
    with noted():
        topology = Topology.blocks(ranks, ranks_per_node=gpus_per_node)
        for name, found in start_certificates(config, models, topology).items():
            yield render_sync(found, f"{name} from the actor, once at the start")


def _microbatches(config: RunConfig, models: "list[ModelRole]", notes: list[str], given: str) -> list[str]:
    from rlhf.preflight.microbatches import plan_work, render_work, work_notes  # noqa: PLC0415

    with noted():
        lengths = read_lengths(given) if given else guess_lengths(config)
        notes += lengths_notes(config, lengths)
        works = plan_work(config, models, lengths)
        notes += work_notes(works)
        return [render_work(config, works, lengths)] if works else []
    return []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.train CONFIG.yaml [KEY=VALUE ...] --check",
        usage="%(prog)s [options]",
        description="Look at a run without starting it: ranks, memory, bytes of a sync, microbatches, and every fault.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="*", help="CONFIG.yaml [KEY=VALUE ...], as for the run")
    parser.add_argument("--world-size", type=_count, default=0, help="ranks of the job (as many as the pools need)")
    parser.add_argument("--gpus-per-node", type=_count, default=8, help="ranks on a node (8)")
    parser.add_argument("--gpu-memory", type=_gib, default=0.0, help="of a GPU, in GiB; holding more is a fault")
    parser.add_argument(
        "--lengths", default="", help="TOKENS:WEIGHT,..., a file with a length a line, or a samples.jsonl"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given; needs a whole number of at least 1")
    return int(text)


def _gib(text: str) -> float:
    if not text.replace(".", "", 1).isdigit() or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} given; needs GiB above 0, such as 80")
    return float(text)
