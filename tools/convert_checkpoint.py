"""Checkpoints from one format to another: `rlhf-convert` for a checkout, and for torchrun. See --help.

python tools/convert_checkpoint.py to-megatron models/llama3_8b ckpt/llama3_8b --tp 2 --pp 2
torchrun --nproc-per-node 8 tools/convert_checkpoint.py to-hf ckpt/llama3_8b models/back
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # imports begin at the root, though this file is run as a script

from rlhf.checkpoint.convert.command import console  # noqa: E402

if __name__ == "__main__":
    console()
