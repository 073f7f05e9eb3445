"""A whole checkpoint into the ranks of a job, and the proof that what they hold then is what was saved."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.checkpoint.manifest import read_manifest
from rlhf.checkpoint.state_checksum import StateChecksum
from rlhf.checkpoint.store.data_file import state_sums
from rlhf.checkpoint.store.torch_dist import TorchDistReader
from rlhf.checkpoint.together import from_first, gathered, place
from rlhf.errors import CheckpointError
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import wrapped


def load(
    path: Path, blocks: Sequence[Block], *, group: ProcessGroup | None, tick: Callable[[], None] = lambda: None
) -> None:
    """Fill what this rank wants from a checkpoint.

    Collective over `group` (None: this process alone): a rank's error is raised on all of them. The files are not
    checked here: the checkpoint comes from `newest_whole` or has passed `require_whole`.
    `tick` is called for each item that this rank has read.

    Raises:
        CheckpointError: See `TorchDistReader.read`; names the rank.
    """
    fault = None
    try:
        TorchDistReader(path).read(blocks, tick=tick)
    except CheckpointError as error:
        fault = str(error)
    _raise_first(gathered(fault, group))


def check_state(path: Path, own_blocks: Sequence[Block], *, group: ProcessGroup | None) -> StateChecksum:
    """Prove that the ranks together hold what the checkpoint was made of; the checksum of it, for the console.

    Collective over `group` (None: this process alone). Layouts may differ from the one that saved: sums are of stored
    tensors. Tensors of which no rank brings a block are left out.

    Args:
        path: The checkpoint's folder.
        own_blocks: What this rank would write: over all ranks each element of a tensor once.
        group: See above.

    Raises:
        CheckpointError: A tensor differs, or is not there; names it. On all ranks.
    """
    number, _ = place(group)
    saved = from_first(read_manifest(path).state if number == 0 else None, group)
    assert saved is not None
    unknown = next((one.key for one in own_blocks if one.key not in saved.sums), None)
    _raise_first(gathered(None if unknown is None else f"{path} holds no {unknown}; needs it", group))
    held = state_sum(own_blocks, sorted(saved.sums), group=group)
    wrong = sorted(key for key, found in held.sums.items() if found != saved.sums[key])
    if wrong:
        raise CheckpointError(
            f"{path}: {len(wrong)} of {len(held.sums)} tensors are not what was saved, {wrong[0]} among them "
            f"(checksum {held.sums[wrong[0]] % 2**64:016x}, saved {saved.sums[wrong[0]] % 2**64:016x}); needs "
            "equal bits; the load or the layout's blocks are wrong"
        )
    return held


def state_sum(own_blocks: Sequence[Block], keys: Sequence[str], *, group: ProcessGroup | None) -> StateChecksum:
    """Checksum of what the ranks hold together of some tensors, left out those of which no rank brings a block.

    Collective over `group` (None: this process alone), which adds up three numbers a tensor.

    Args:
        own_blocks: What this rank would write.
        keys: Stored tensors, the same in the same order on all ranks; those of the blocks are among them.
        group: See above.
    """
    places = {key: at for at, key in enumerate(keys)}
    table = torch.zeros(2, len(keys), dtype=torch.int64)
    sums = state_sums([(one.key, one.box, one.data.detach()) for one in own_blocks])
    for block, number in zip(own_blocks, sums, strict=True):
        at = places[block.key]
        table[0, at] = wrapped(int(table[0, at]) + number)
        table[1, at] += block.data.numel() * block.data.element_size()
    if group is not None:
        dist.all_reduce(table, group=group)  # modulo 2^64, as the sums are
    held = [at for at in range(len(keys)) if int(table[1, at]) > 0]
    return StateChecksum({keys[at]: int(table[0, at]) for at in held}, sum(int(table[1, at]) for at in held))


def _raise_first(faults: Sequence[str | None]) -> None:
    """Raises CheckpointError with the first rank's fault."""
    found = [(number, fault) for number, fault in enumerate(faults) if fault is not None]
    if found:
        raise CheckpointError(f"rank {found[0][0]}: {found[0][1]}")
