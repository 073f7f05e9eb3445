"""What lies in a checkpoint's folder of any format: models, sizes, layout, step; whether every byte is as written."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

from rlhf.checkpoint.convert.integrity import Integrity, against_manifest, damage_of, integrity_of
from rlhf.checkpoint.convert.megatron_args import read_args
from rlhf.checkpoint.convert.opening import open_weights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.outcome import listed, remarks_json
from rlhf.checkpoint.convert.places import RECORD_FILE, StoredPlace, find_stored
from rlhf.checkpoint.convert.sources import Weights
from rlhf.checkpoint.convert.stored import OF_ANOTHER, StoredWeights, roles_in
from rlhf.checkpoint.convert.whole import refuse_needless
from rlhf.checkpoint.legacy.weights import LegacyWeights, find_legacy
from rlhf.checkpoint.manifest import MANIFEST_FILE, read_manifest
from rlhf.checkpoint.store.stored_metadata import read_metadata
from rlhf.checkpoint.store.torch_dist import COMMON_FILE
from rlhf.errors import CheckpointError, DamagedError, UnreadableError
from rlhf.families.files import HfFolder
from rlhf.families.folder import SINGLE_FILE, weight_files
from rlhf.families.registry import logical_tensors, read_json
from rlhf.families.spec import ModelSpec

_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Axis of a layout -> Megatron-LM's name of its size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One model of a checkpoint."""

    role: str
    """Empty where the checkpoint is one model."""
    weights: Weights | None
    """None where it cannot be told, see `why`."""
    why: str
    layout: Mapping[str, object]
    """Sizes that the folder was written for, or by; empty where nothing says so."""
    steps_done: int | None
    """Of its optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What `inspect` shows."""

    path: Path
    kind: str
    models: tuple[Model, ...]
    num_files: int
    """With weights; 0 where damage lets nothing be told."""
    num_blocks: int
    """Stored: tensors of a Hugging Face folder, items of a distributed checkpoint."""
    num_bytes: int
    """Of these files."""
    step: int | None
    integrity: Integrity

    def text(self) -> str:
        """For the console."""
        step = "" if self.step is None else f", step {self.step}"
        lines = [f"{self.path}: {self.kind}{step}"]
        for model in self.models:
            lines += _model_lines(model)
        if self.num_files:
            lines.append(f"  files     {self.num_files}, {self.num_blocks} blocks, {self.num_bytes:,} bytes")
        lines.append(f"  checksum  {self.integrity.state.upper()}: {self.integrity.what}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "step": self.step,
            "num_files": self.num_files,
            "num_blocks": self.num_blocks,
            "num_bytes": self.num_bytes,
            "checksum": {"state": self.integrity.state, "what": self.integrity.what},
            "models": [_model_json(model) for model in self.models],
        }


def inspect(given: Given, *, check: bool) -> Inspection:
    """Look at a folder. One process; reads headers, and with `check` every byte that a manifest has a checksum of.

    Raises:
        CheckpointError: There is no checkpoint, or one that is whole and of no kind that is known here.
    """
    try:
        return _inspect(given, check=check)
    except CheckpointError as error:
        damage = str(error) if isinstance(error, DamagedError) else damage_of(given.path)
        if damage is None:
            raise
    return Inspection(
        path=given.path,
        kind="a checkpoint that cannot be read",
        models=(),
        num_files=0,
        num_blocks=0,
        num_bytes=0,
        step=None,
        integrity=Integrity(state="damaged", what=damage),
    )


def _inspect(given: Given, *, check: bool) -> Inspection:
    place = find_stored(given.path) if given.path.is_dir() else None
    if place is not None:
        return _inspect_stored(place, given, check=check)
    legacy = find_legacy(given.path) if given.path.is_dir() else None
    return _inspect_hf(given) if legacy is None else _inspect_legacy(legacy, given, check=check)


def _inspect_hf(given: Given) -> Inspection:
    weights = open_weights(given)
    refuse_needless(given, weights)
    files = sorted(set(weight_files(given.path).values())) or [SINGLE_FILE]
    told = "every file is as long as its header says; a Hugging Face folder has no checksums"
    return Inspection(
        path=given.path,
        kind=weights.kind,
        models=(Model(role="", weights=weights, why="", layout={}, steps_done=None),),
        num_files=len(files),
        num_blocks=len(HfFolder(given.path).names()),
        num_bytes=sum((given.path / file).stat().st_size for file in files),
        step=None,
        integrity=Integrity(state="unknown", what=told),
    )


def _inspect_stored(place: StoredPlace, given: Given, *, check: bool) -> Inspection:
    items = read_metadata(place.inner)
    ends: dict[str, int] = {}
    for ones in items.values():
        for name, item in ones:
            ends[name] = max(ends.get(name, 0), item.start + item.num_bytes)
    roles = roles_in(items.keys())
    if given.role and given.role not in roles:
        listed = ", ".join(one or "one without a name" for one in roles) or "none"
        raise CheckpointError(f"{place.folder}: no model {given.role!r}; it holds {listed}; choose one with --role")
    roles = [given.role] if given.role else roles
    return Inspection(
        path=place.folder,
        kind=place.kind,
        models=tuple(_model_in(place, replace(given, role=role), role) for role in roles),
        num_files=len(ends),
        num_blocks=sum(len(ones) for ones in items.values()),
        num_bytes=sum(path.stat().st_size for name in ends if (path := place.inner / name).is_file()),
        step=_step_of(place),
        integrity=integrity_of(place, ends, check=check),
    )


def _inspect_legacy(inner: Path, given: Given, *, check: bool) -> Inspection:
    weights = LegacyWeights(inner, given)
    refuse_needless(given, weights)
    folder = inner.parent if (inner.parent / MANIFEST_FILE).is_file() else inner
    layout = {axis: getattr(weights.parallel, axis) for axis in _AXES}
    return Inspection(
        path=given.path,
        kind=weights.kind,
        models=(Model(role="", weights=weights, why="", layout=layout, steps_done=None),),
        num_files=len(weights.files),
        num_blocks=weights.num_blocks,
        num_bytes=sum(path.stat().st_size for path in weights.files),
        step=weights.iteration,
        integrity=against_manifest(folder, check=check)
        or Integrity(state="unknown", what=f"no {MANIFEST_FILE}, so no checksums; all files are there"),
    )


def _model_in(place: StoredPlace, given: Given, role: str) -> Model:
    record = place.folder / "roles" / f"{role}.json"
    told = read_json(record) if record.is_file() else {}
    optimizer = told.get("optimizer")
    steps_done = optimizer.get("steps_done") if isinstance(optimizer, Mapping) else None
    weights, why = None, ""
    try:
        weights = StoredWeights(place, given)
    except CheckpointError as error:
        why = str(error)
    return Model(role=role, weights=weights, why=why, layout=_layout(place, told), steps_done=steps_done)


def _layout(place: StoredPlace, told: Mapping[str, object]) -> dict[str, object]:
    """As the role's record, the conversion's record or Megatron-LM's args say."""
    if isinstance(parallel := told.get("parallel"), Mapping):
        return dict(parallel)
    if (place.folder / RECORD_FILE).is_file():
        layout = read_json(place.folder / RECORD_FILE).get("layout")
        return dict(layout) if isinstance(layout, Mapping) else {}
    args = read_args(place.inner / COMMON_FILE)
    return {axis: args[name] for axis, name in _AXES.items() if args.get(name) is not None}


def _step_of(place: StoredPlace) -> int | None:
    if (place.folder / MANIFEST_FILE).is_file():
        try:
            return read_manifest(place.folder).step
        except UnreadableError:
            raise
        except CheckpointError:
            return None
    number = place.inner.name.removeprefix("iter_")
    return int(number) if number.isdecimal() else None


def _num_parameters(spec: ModelSpec, weights: Weights) -> int:
    return sum(prod(tensor.shape) for tensor in logical_tensors(spec, head=weights.head))


def _model_lines(model: Model) -> Sequence[str]:
    name = f"  {model.role}\n" if model.role else ""
    if model.weights is None:
        return [f"{name}  model     not known: {model.why}"]
    spec, weights = model.weights.spec, model.weights
    experts = f", {spec.num_experts} experts of {spec.moe_ffn_size}" if spec.num_experts else ""
    rope = "" if spec.rope_scaling is None else f", llama3 scaling x{spec.rope_scaling.factor:g}"
    lines = [
        f"{name}  family    {spec.family}, {_num_parameters(spec, weights):,} parameters, {weights.head.value} head"
        f"{', tied' if spec.tied_embeddings else ''}, {', '.join(_dtypes(weights))}",
        f"  sizes     {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} heads of {spec.head_dim} "
        f"on {spec.num_kv_heads}, ffn {spec.ffn_size}{experts}, vocabulary {spec.vocab_size}",
        f"  numbers   norm eps {spec.norm_eps:g}, rope theta {spec.rope_theta:g}{rope}, {spec.max_positions} positions",
    ]
    if model.layout:
        sizes = {axis: size for axis, size in model.layout.items() if size not in (1, 0, [], None)}
        lines.append(f"  layout    {' '.join(f'{axis}{size}' for axis, size in sizes.items()) or 'one rank'}")
    if model.steps_done is not None:
        lines.append(f"  trained   {model.steps_done} optimizer steps")
    return [*lines, *listed(one for one in weights.remarks if not model.role or one.why != OF_ANOTHER)]


def _model_json(model: Model) -> dict[str, object]:
    base = {"role": model.role, "layout": dict(model.layout), "steps_done": model.steps_done}
    if model.weights is None:
        return {**base, "known": False, "why": model.why}
    spec = model.weights.spec
    return {
        **base,
        "known": True,
        "family": spec.family,
        "head": model.weights.head.value,
        "num_parameters": _num_parameters(spec, model.weights),
        "dtypes": _dtypes(model.weights),
        "spec": asdict(spec),
        **remarks_json(model.weights.remarks),
    }


def _dtypes(weights: Weights) -> list[str]:
    return sorted({str(dtype).removeprefix("torch.") for dtype in weights.dtypes.values()})
