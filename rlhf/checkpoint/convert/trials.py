"""`--dry-run` and `--dummy` of the conversions: the plan alone, or all of it with weights that are made up."""

import argparse
from functools import partial

from rlhf.checkpoint.convert import options
from rlhf.checkpoint.convert.forecast import Forecast, forecast_hf, forecast_legacy, forecast_megatron
from rlhf.checkpoint.convert.made import made_weights
from rlhf.checkpoint.convert.options import DIFFERENT
from rlhf.checkpoint.convert.plan import target_layout
from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.rehearsal import Convert, rehearse
from rlhf.checkpoint.convert.to_hf import to_hf
from rlhf.checkpoint.convert.to_legacy import to_legacy
from rlhf.checkpoint.convert.to_megatron import to_megatron
from rlhf.config.parallel import ParallelConfig

SOURCE_SHARD_BYTES = 5 * 10**9


def try_to_megatron(args: argparse.Namespace, crew: Crew) -> int:
    """The exit code. Collective over the crew."""
    parallel = crew.together(lambda: target_layout(**options.layout(args)))
    use_te = args.names != "local"
    if args.dry_run:
        weights = crew.together(lambda: made_weights(args.source, dtype=""))
        kept = {"parallel": parallel, "dtype": args.dtype, "processes": _processes(args, crew)}
        if args.format == "legacy":
            return _show_plan(args, crew, forecast_legacy(weights, args.out, **kept, use_te=use_te))
        return _show_plan(args, crew, forecast_megatron(weights, args.out, **kept))
    chosen = to_megatron if args.format == "torch_dist" else partial(to_legacy, use_te=use_te)
    convert = partial(chosen, parallel=parallel, dtype="", overwrite=False)
    return _rehearse(args, crew, partial(to_hf, dtype="", shard_bytes=SOURCE_SHARD_BYTES, overwrite=False), convert)


def try_to_hf(args: argparse.Namespace, crew: Crew) -> int:
    """The exit code. Collective over the crew."""
    if args.dry_run:
        weights = crew.together(lambda: made_weights(args.source, dtype=""))
        kept = {"dtype": args.dtype, "shard_bytes": args.shard_size, "processes": _processes(args, crew)}
        return _show_plan(args, crew, forecast_hf(weights, args.out, **kept))
    make = partial(to_megatron, parallel=ParallelConfig(), dtype="", overwrite=False)
    return _rehearse(args, crew, make, partial(to_hf, dtype="", shard_bytes=args.shard_size, overwrite=False))


def _processes(args: argparse.Namespace, crew: Crew) -> int:
    return int(args.processes or crew.size)


def _show_plan(args: argparse.Namespace, crew: Crew, plan: Forecast) -> int:
    crew.lead(lambda: options.show(plan.text(), plan.as_json(), args.json))
    return 0


def _rehearse(args: argparse.Namespace, crew: Crew, make: Convert, convert: Convert) -> int:
    weights = crew.together(lambda: made_weights(args.source, dtype=args.dtype))
    found = rehearse(weights, args.out, crew, make=make, convert=convert)
    crew.lead(lambda: options.show(found.text(), found.as_json(), args.json))
    return 0 if found.is_same else DIFFERENT
