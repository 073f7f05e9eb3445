"""Rotary positions: settings of Hugging Face configs (transformers 4.x: two keys, 5.x: one) and what they mean."""

from collections.abc import Mapping
from math import pi
from typing import TYPE_CHECKING

from rlhf.errors import CheckpointError
from rlhf.families.spec import ModelSpec, RopeScaling

if TYPE_CHECKING:
    from torch import Tensor

_ORIGINAL = "original_max_position_embeddings"


def read_rope(entries: Mapping[str, object], *, max_positions: int, where: str) -> tuple[float, RopeScaling | None]:
    """Base frequency and Llama 3 scaling from `rope_theta` + `rope_scaling` (4.x) or `rope_parameters` (5.x).

    Raises:
        CheckpointError: The rope type is neither default nor llama3, a number is missing or cannot be one, or both are
            given and say otherwise: transformers takes `rope_scaling` then, and other programs the other.
    """
    newer, older = (_settings(entries, key, where) for key in ("rope_parameters", "rope_scaling"))
    if newer and older and _said(newer, entries) != _said(older, entries):
        raise CheckpointError(
            f"{where}: rope_parameters is {newer!r}, rope_scaling is {older!r}; needs one, or the same in both; "
            "remove the one that is not meant"
        )
    found = newer or older
    kind = found.get("rope_type", found.get("type", "default"))
    theta = positive_number({**entries, **found}, "rope_theta", where)
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor = {found['partial_rotary_factor']}; needs 1.0")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"{where}: rope type {kind!r}; needs default or llama3; choose a model whose positions are not stretched so"
        )
    factor, low, high = (positive_number(found, f"{name}factor", where) for name in ("", "low_freq_", "high_freq_"))
    if low >= high:
        raise CheckpointError(
            f"{where}: low_freq_factor = {low}, high_freq_factor = {high}; needs the first below; correct them"
        )
    original = positive_number({_ORIGINAL: max_positions, **found}, _ORIGINAL, where)
    return theta, RopeScaling(
        factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=int(original)
    )


def _settings(entries: Mapping[str, object], key: str, where: str) -> Mapping[str, object]:
    found = entries.get(key) or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise CheckpointError(
            f"{where}: rope settings {found!r}; needs one set for all layers; choose a model of another kind"
        )
    return found


def _said(found: Mapping[str, object], entries: Mapping[str, object]) -> dict[str, object]:
    """Settings with what they leave to others filled in."""
    kind = found.get("rope_type", found.get("type", "default"))
    return {"rope_theta": entries.get("rope_theta"), **found, "rope_type": kind, "type": kind}


def positive_number(entries: Mapping[str, object], key: str, where: str) -> float:
    """A number above 0 from a config.

    Raises:
        CheckpointError: It is missing or something else.
    """
    found = entries.get(key)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
        said = "missing" if found is None else f"{found!r}"
        raise CheckpointError(f"{where}: {key} is {said}; needs a number above 0; correct the file")
    return float(found)


def rope_entries(spec: ModelSpec) -> dict[str, object]:
    """The config keys of both generations of transformers for a spec's rotary settings."""
    if spec.rope_scaling is None:
        return {
            "rope_theta": spec.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        }
    scaling = {
        "rope_type": "llama3",
        "factor": spec.rope_scaling.factor,
        "low_freq_factor": spec.rope_scaling.low_freq_factor,
        "high_freq_factor": spec.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": spec.rope_scaling.original_max_positions,
    }
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": spec.rope_theta},
    }


def rotary_frequencies(spec: ModelSpec) -> "Tensor":
    """Radians per position of each pair of channels, float32 [head_dim / 2].

    Source: `_compute_llama3_parameters` of transformers, from Llama 3.1: low frequencies are divided by the factor,
    high ones stay, those between are blended.
    """
    import torch  # noqa: PLC0415  # rlhf/preflight reads specs before torch is there

    channels = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float()
    freqs = 1.0 / (spec.rope_theta ** (channels / spec.head_dim))
    scaling = spec.rope_scaling
    if scaling is None:
        return freqs
    wavelengths = 2 * pi / freqs
    blend = scaling.original_max_positions / wavelengths - scaling.low_freq_factor
    blend = blend / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * freqs / scaling.factor + blend * freqs
    is_low = wavelengths > scaling.original_max_positions / scaling.low_freq_factor
    is_high = wavelengths < scaling.original_max_positions / scaling.high_freq_factor
    return torch.where(is_high, freqs, torch.where(is_low, freqs / scaling.factor, blended))
