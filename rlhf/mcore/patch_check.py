"""Whether every patch that this machine needs still fits the Megatron-Core that is installed.

    python -m rlhf.mcore.patch_check

Prints how many there are; exit 1 and the reason when one was written for another source.
"""

import importlib.util
import sys

import torch

from megatron_patches.patch import PatchError
from megatron_patches.registry import apply, choose


def main() -> int:
    """The exit code. Puts the patches in place, so it is for a process of its own."""
    mends = choose(
        has_cuda=torch.cuda.is_available(), has_te=importlib.util.find_spec("transformer_engine") is not None
    )
    try:
        apply(mends)
    except PatchError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{len(mends)} patches fit\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
