"""Two checkpoints' configs side by side: every number of the model, and the files that are carried along."""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

from rlhf.checkpoint.convert.sources import Weights
from rlhf.families.registry import read_json
from rlhf.families.spec import ModelSpec
from rlhf.families.writer import TOKEN_IDS, carried_files

_NOT_OF_MEGATRON = frozenset({"family", "init_std", "max_positions", "rope_scaling"})
"""Fields of a spec that Megatron-LM's args do not tell, or not all of it, or that change no output."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting on both sides."""

    name: str
    first: str
    second: str

    @property
    def is_same(self) -> bool:
        """Whether both sides say the same."""
        return self.first == self.second


def compare_configs(first: Weights, second: Weights) -> tuple[Row, ...]:
    """Numbers of the specs, what Megatron-LM's args say of them, special tokens, contents of the carried files."""
    rows = [Row("head", first.head.value, second.head.value)]
    rows += [
        Row(field.name, _said(getattr(first.spec, field.name)), _said(getattr(second.spec, field.name)))
        for field in fields(ModelSpec)
    ]
    for side in (first, second):
        rows += _args_rows(side)
    if first.hf_files is not None and second.hf_files is not None:
        configs = [read_json(folder / "config.json") for folder in (first.hf_files, second.hf_files)]
        rows += [Row(key, *(_said(config.get(key)) for config in configs)) for key in TOKEN_IDS]
        rows += _file_rows(first.hf_files, second.hf_files)
    return tuple(rows)


def _args_rows(side: Weights) -> list[Row]:
    """A spec against Megatron-LM's args in the same checkpoint."""
    if side.args_spec is None:
        return []
    theirs, rows = side.args_spec, []
    for field in fields(ModelSpec):
        if field.name not in _NOT_OF_MEGATRON | ({"ffn_size"} if side.spec.num_experts else set()):
            ours = getattr(side.spec, field.name)
            rows.append(Row(f"{field.name} (args of {side.path})", _said(ours), _said(getattr(theirs, field.name))))
    factors = [spec.rope_scaling.factor if spec.rope_scaling else None for spec in (side.spec, theirs)]
    rows.append(Row(f"rope_scaling.factor (args of {side.path})", *map(_said, factors)))
    return rows


def _file_rows(first: Path, second: Path) -> list[Row]:
    names = sorted({str(path.relative_to(folder)) for folder in (first, second) for path in carried_files(folder)})
    return [Row(name, *(_content(folder / name) for folder in (first, second))) for name in names]


def _content(path: Path) -> str:
    """Size and sum: a file's content in few words."""
    if not path.is_file():
        return "missing"
    content = path.read_bytes()
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:12]}"


def _said(value: object) -> str:
    return repr(value) if isinstance(value, bool | int | float | str) or value is None else str(value)
