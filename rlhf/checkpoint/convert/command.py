"""Checkpoints from one format to another, and the proof that nothing changed.

    rlhf-convert to-megatron models/llama3_8b ckpt/llama3_8b --tp 2 --pp 2
    rlhf-convert to-megatron models/llama3_8b ckpt/legacy --format legacy --tp 2 --pp 2
    rlhf-convert to-megatron llama3-405b ckpt/llama3_405b --tp 8 --pp 16 --dry-run
    rlhf-convert to-hf ckpt/llama3_8b models/back --shard-size 5GB
    rlhf-convert to-hf runs/ppo/checkpoints/step_00000100 models/critic --role critic
    rlhf-convert verify models/llama3_8b ckpt/llama3_8b --json report.json
    rlhf-convert inspect ckpt/llama3_8b
    torchrun --nproc-per-node 8 tools/convert_checkpoint.py to-megatron models/llama3_70b ckpt/llama3_70b --tp 8 --pp 4

Reads Hugging Face folders (safetensors), converted folders, training checkpoints and Megatron-LM's checkpoints,
distributed (torch_dist) or legacy (mp_rank folders). Blocks of at most 256 MiB are read and written one after the
other, so memory does not grow with the model. A folder that is written appears when it is whole. Exit code 0; 1 when
`verify` found a difference or `inspect` damage; 2 for input that cannot be converted (torchrun makes 1 of both).
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rlhf.checkpoint.convert import options
from rlhf.errors import RlhfError

DIFFERENT = options.DIFFERENT
BAD_INPUT = 2


def main(argv: Sequence[str]) -> int:
    """The exit code. On every process, when there are several."""
    args = _parser().parse_args(argv)
    try:
        options.check(args)
        return _COMMANDS[args.command](args)
    except (RlhfError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT


def console() -> None:
    """Entry of the console script."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


def _to_hf(args: argparse.Namespace) -> int:
    from rlhf.checkpoint.convert.ranks import Crew, with_crew  # noqa: PLC0415  # --help needs no torch
    from rlhf.checkpoint.convert.to_hf import to_hf  # noqa: PLC0415
    from rlhf.checkpoint.convert.whole import open_whole, refuse_needless  # noqa: PLC0415

    def work(crew: Crew) -> int:
        crew.lead(lambda: options.check_report(args.json))
        if args.dry_run or args.dummy:
            from rlhf.checkpoint.convert.trials import try_to_hf  # noqa: PLC0415

            return try_to_hf(args, crew)
        weights = open_whole(options.given(args), crew, check=args.check)
        refuse_needless(options.given(args), weights)
        done = to_hf(weights, args.out, crew, dtype=args.dtype, shard_bytes=args.shard_size, overwrite=args.overwrite)
        crew.lead(lambda: options.show(done.text(), done.as_json(), args.json))
        return 0

    return with_crew(work)


def _to_megatron(args: argparse.Namespace) -> int:
    from rlhf.checkpoint.convert.plan import target_layout  # noqa: PLC0415
    from rlhf.checkpoint.convert.ranks import Crew, with_crew  # noqa: PLC0415
    from rlhf.checkpoint.convert.to_legacy import to_legacy  # noqa: PLC0415
    from rlhf.checkpoint.convert.to_megatron import to_megatron  # noqa: PLC0415
    from rlhf.checkpoint.convert.whole import open_whole, refuse_needless  # noqa: PLC0415

    convert = to_megatron if args.format == "torch_dist" else partial(to_legacy, use_te=args.names != "local")

    def work(crew: Crew) -> int:
        crew.lead(lambda: options.check_report(args.json))
        if args.dry_run or args.dummy:
            from rlhf.checkpoint.convert.trials import try_to_megatron  # noqa: PLC0415

            return try_to_megatron(args, crew)
        parallel = crew.together(lambda: target_layout(**options.layout(args)))
        weights = open_whole(options.given(args), crew, check=args.check)
        refuse_needless(options.given(args), weights)
        done = convert(weights, args.out, crew, parallel=parallel, dtype=args.dtype, overwrite=args.overwrite)
        crew.lead(lambda: options.show(done.text(), done.as_json(), args.json))
        return 0

    return with_crew(work)


def _verify(args: argparse.Namespace) -> int:
    from rlhf.checkpoint.convert.ranks import Crew, with_crew  # noqa: PLC0415
    from rlhf.checkpoint.convert.whole import open_whole, refuse_needless  # noqa: PLC0415
    from rlhf.checkpoint.verify.command import verify  # noqa: PLC0415

    def work(crew: Crew) -> int:
        crew.lead(lambda: options.check_report(args.json))
        first, second = (open_whole(options.given(args, name), crew, check=args.check) for name in ("a", "b"))
        refuse_needless(options.given(args, "a"), first, second)
        found = verify(first, second, crew, cast=args.dtype, with_logits=args.logits)
        crew.lead(lambda: options.show(found.text(), found.as_json(), args.json))
        return 0 if found.is_same else DIFFERENT

    return with_crew(work)


def _inspect(args: argparse.Namespace) -> int:
    from rlhf.checkpoint.convert.inspect_folder import inspect  # noqa: PLC0415

    options.check_report(args.json)
    found = inspect(options.given(args), check=args.check)
    options.show(found.text(), found.as_json(), args.json)
    return DIFFERENT if found.integrity.state == "damaged" else 0


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "to-megatron": _to_megatron,
    "to-hf": _to_hf,
    "verify": _verify,
    "inspect": _inspect,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf-convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_megatron = _command(
        commands,
        "to-megatron",
        "any checkpoint -> a folder that Megatron-LM and we load",
        (
            "models/llama3_8b ckpt/llama3_8b --tp 2 --pp 2",
            "models/qwen3_moe ckpt/qwen3_moe --tp 2 --ep 8 --dtype bfloat16",
        ),
    )
    options.add_source(to_megatron, "SOURCE")
    options.add_out(to_megatron)
    options.add_layout(to_megatron)
    options.add_check(to_megatron)
    options.add_format(to_megatron)
    options.add_trials(to_megatron)
    options.add_json(to_megatron)
    to_hf = _command(
        commands,
        "to-hf",
        "any checkpoint -> a Hugging Face folder",
        ("ckpt/llama3_8b models/back --shard-size 2GB", "runs/ppo/checkpoints models/critic --role critic"),
    )
    options.add_source(to_hf, "SOURCE")
    options.add_out(to_hf)
    to_hf.add_argument(
        "--shard-size",
        type=options.num_bytes,
        default=options.num_bytes("5GB"),
        metavar="SIZE",
        help="upper size of a safetensors file: 5GB, 500MB, 2GiB (5GB)",
    )
    options.add_check(to_hf)
    options.add_trials(to_hf)
    options.add_json(to_hf)
    verify = _command(
        commands,
        "verify",
        "do two checkpoints hold the same model? Exit code 0: yes; 1: what differs is named",
        ("models/llama3_8b ckpt/llama3_8b --json report.json", "models/llama3_8b models/short --dtype bfloat16"),
    )
    verify.add_argument("a", type=Path, metavar="A", help="a checkpoint's folder, in any format")
    verify.add_argument("b", type=Path, metavar="B", help="another")
    options.add_about(verify)
    options.add_check(verify)
    verify.add_argument(
        "--dtype", default="", choices=options.DTYPES, help="compare after a cast to it (bits, and dtypes too)"
    )
    verify.add_argument(
        "--logits",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare what transformers and our Megatron model say, where two float32 models fit into memory (yes)",
    )
    options.add_json(verify)
    inspect = _command(
        commands,
        "inspect",
        "what lies in a checkpoint's folder, and whether it is whole. Exit code 1: it is damaged",
        ("ckpt/llama3_8b", "runs/ppo/checkpoints/step_00000100 --no-check --json step.json"),
    )
    options.add_source(inspect, "CHECKPOINT")
    options.add_check(inspect)
    options.add_json(inspect)
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str, examples: Sequence[str]
) -> argparse.ArgumentParser:
    lines = "\n".join(f"  rlhf-convert {name} {example}" for example in examples)
    return commands.add_parser(
        name,
        help=what,
        description=what,
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
