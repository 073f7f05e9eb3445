"""Run as a program on a checkpoint folder: memory that one rank takes while it loads its part, and while it cheats."""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from rlhf.config.parallel import ParallelConfig
from rlhf.families.files import HfFolder
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.load import load_weights
from rlhf.mcore.params import local_params
from tests.mcore.stand_in import stand_in_model

PARALLEL, RANK = ParallelConfig(tp=2, pp=2), 1


def private_bytes() -> int:
    """Memory of this process that no file stands behind."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def peak_growth(folder: Path, *, whole: bool) -> int:
    """Bytes above the start, seen at each read; whole: every read takes the whole checkpoint first."""
    model = stand_in_model(read_spec(folder), PARALLEL, RANK)
    before, seen, read = private_bytes(), [], HfFolder.read

    def watched(self, name, box):
        everything = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()} if whole else {}
        found = read(self, name, box)
        seen.append(private_bytes() - before)
        everything.clear()
        return found

    HfFolder.read = watched
    try:
        load_weights(model, folder)
    finally:
        HfFolder.read = read
    return max(*seen, private_bytes() - before)


def main() -> None:
    folder = Path(sys.argv[1])
    spec = read_spec(folder)
    pieces = megatron_layout(spec, PARALLEL, head=Head.LM, dtype="float32").holdings(RANK)
    params = local_params(stand_in_model(spec, PARALLEL, RANK))
    numbers = {
        "shard": 4 * sum(param.numel() for param in params.values()),
        "largest_slice": 4 * max(piece.box.num_elements for piece in pieces),
        "growth": peak_growth(folder, whole=False),
        "growth_of_a_cheat": peak_growth(folder, whole=True),
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
