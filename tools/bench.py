"""Benchmarks: `python tools/bench.py NAME`, see `--help`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # imports begin at the root, though this file is run as a script

from tools.benchmarks.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
