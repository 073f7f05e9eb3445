"""Draws the curves of runs from their metrics.jsonl: one run, or several over one another with a colour each.

    python tools/plot_run.py runs/quickstart                          -> runs/quickstart/curves.png
    python tools/plot_run.py runs/a runs/b runs/c --out compare.png   the three over one another
    python tools/plot_run.py runs/a --smooth 1                        every step as it was

A run may still be going, may have been cut short, and may be of another trainer than the others.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.errors import DataError
from rlhf.metrics.curves import draw_curves
from rlhf.metrics.run_folder import RunFolder
from rlhf.metrics.series import read_runs

BAD_INPUT = 2


def main(argv: Sequence[str]) -> int:
    """0, or 2 when there is nothing to draw or no place for it."""
    args = _parser().parse_args(argv)
    folders = list(dict.fromkeys(args.runs))
    out = args.out or (RunFolder(folders[0]).curves if len(folders) == 1 else Path("curves.png"))
    try:
        draw_curves(read_runs(folders), out, smooth=args.smooth)
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    except OSError as error:
        sys.stderr.write(f"--out: {out} cannot be written ({error}); needs a place to write; give another\n")
        return BAD_INPUT
    sys.stdout.write(f"{out}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/plot_run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/quickstart")
    parser.add_argument(
        "--out", type=_png, metavar="FILE", help="PNG to write; RUN/curves.png for one run, else ./curves.png"
    )
    parser.add_argument(
        "--smooth",
        type=_at_least_one,
        default=0,
        metavar="N",
        help="steps that a line is averaged over; 1 for none (default: a tenth of them, from 40 steps on)",
    )
    return parser


def _png(text: str) -> Path:
    if Path(text).suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text} given; needs a name that ends with .png; pictures are PNG")
    return Path(text)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} given; needs at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
