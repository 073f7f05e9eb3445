"""Which ranks Megatron-LM's legacy files are of: names of their folders, and the layout that they tell.

`mp_rank_TT`, with `_PPP` where there are several stages and `_EEE` where experts are shared out: tp, pp and ep
coordinates. A rank's experts are the file's of its own tp and ep coordinates, so etp shows in no name.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from rlhf.checkpoint.convert.plan import target_layout
from rlhf.checkpoint.legacy.file import FILE_NAME, LegacyFile, read_legacy_file
from rlhf.config.parallel import ParallelConfig
from rlhf.errors import CheckpointError, DamagedError
from rlhf.mcore.groups import expert_grid, model_grid
from rlhf.reshard.layout import ModelLayout

_FOLDER = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def legacy_folders(path: Path) -> tuple[str, ...]:
    """Names of the ranks' folders in a checkpoint's folder; none where it is of another format."""
    if not path.is_dir():
        return ()
    return tuple(sorted(one.name for one in path.iterdir() if _FOLDER.fullmatch(one.name) and one.is_dir()))


def rank_folder(parallel: ParallelConfig, rank: int) -> str:
    """Name of the folder of a rank of the pool."""
    at = model_grid(parallel).coords(rank)
    ep_rank = expert_grid(parallel).coords(at["tp"] + parallel.tp * at["dp"])["ep"]
    stage = f"_{at['pp']:03d}" if parallel.pp > 1 else ""
    experts = f"_{ep_rank:03d}" if parallel.ep > 1 else ""
    return f"mp_rank_{at['tp']:02d}{stage}{experts}"


def ranks_of_folders(parallel: ParallelConfig, layout: ModelLayout, *, where: str) -> Mapping[str, int]:
    """The folders of a layout, each with a rank that holds what is in it.

    Raises:
        CheckpointError: Two ranks that hold different blocks would have one folder.
    """
    found: dict[str, int] = {}
    for rank in layout.ranks:
        other = found.setdefault(rank_folder(parallel, rank), rank)
        if layout.holdings(other) != layout.holdings(rank):
            raise CheckpointError(
                f"{where}: ranks {other} and {rank} of tp {parallel.tp}, ep {parallel.ep}, etp {parallel.etp} hold "
                f"different experts, but Megatron-LM's legacy format has {rank_folder(parallel, rank)} for both; needs "
                "etp of at most tp; use torch_dist, or another etp"
            )
    return found


class LegacyFiles:
    """The files of one checkpoint, each read once; and their layout, from the first one's args and all stages' layers.

    Raises:
        CheckpointError: A file is missing, too many or damaged, or its args say no layout.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, LegacyFile] = {}
        names = legacy_folders(folder)
        if not names:
            raise CheckpointError(f"{folder}: no mp_rank folders; needs Megatron-LM's legacy files; correct the path")
        self.first = self.of(names[0])
        tp, pp = (self._size(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline"))
        ep = self._size("expert_model_parallel_size", 1) if self.first.args.get("num_experts") else 1
        etp = self._size("expert_tensor_parallel_size", tp) if self.first.args.get("num_experts") else 1
        bare = target_layout(tp=tp, pp=pp, vpp=1, ep=ep, etp=etp)
        wanted = {rank_folder(bare, rank) for rank in bare.ranks}
        if wanted != set(names):
            missing, needless = sorted(wanted - set(names)), sorted(set(names) - wanted)
            said = f"no {missing[0]}" if missing else f"{needless[0]}, which is of another layout"
            raise DamagedError(
                f"{folder}: {said}; needs {len(wanted)} folders for tp {tp}, pp {pp}, ep {ep} of its args; "
                "fetch it again"
            )
        vpp = len(self.first.chunks)
        counts = [0] * (pp * vpp)
        for stage, rank in enumerate(range(0, bare.num_ranks, bare.tp)[:pp]):
            for number, chunk in enumerate(self.of(rank_folder(bare, rank)).chunks):
                counts[number * pp + stage] = _num_layers(chunk)
        self.parallel = target_layout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, layers_per_stage=tuple(counts))

    def of(self, name: str) -> LegacyFile:
        """The file in a rank's folder."""
        if name not in self._files:
            file = read_legacy_file(self.folder / name / FILE_NAME)
            chunks = len(next(iter(self._files.values()), file).chunks)
            if len(file.chunks) != chunks:
                raise CheckpointError(
                    f"{file.path}: {len(file.chunks)} model chunks; needs {chunks}, as the other files have"
                )
            self._files[name] = file
        return self._files[name]

    @property
    def read(self) -> tuple[LegacyFile, ...]:
        """Those that were read so far."""
        return tuple(file for _, file in sorted(self._files.items()))

    def _size(self, name: str, default: int | None = None) -> int:
        found = self.first.args.get(name)
        if found is None:
            found = default
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise CheckpointError(
                f"{self.first.path}: {name} is {found!r} in its args; needs a number of ranks; "
                "the file is of another kind"
            )
        return found


def _num_layers(names: Mapping[str, object]) -> int:
    return len({found[1] for name in names if (found := _LAYER.match(name))})
