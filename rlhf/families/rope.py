"""Rotary settings of Hugging Face configs: transformers 4.x keeps them in two keys, 5.x in one."""

from collections.abc import Mapping

from rlhf.errors import CheckpointError
from rlhf.families.spec import ModelSpec, RopeScaling


def read_rope(entries: Mapping[str, object], *, max_positions: int, where: str) -> tuple[float, RopeScaling | None]:
    """Base frequency and Llama 3 scaling from `rope_theta` + `rope_scaling` (4.x) or `rope_parameters` (5.x).

    Raises:
        CheckpointError: The rope type is neither default nor llama3, or a factor is missing.
    """
    found = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise CheckpointError(
            f"{where}: rope settings {found!r}; needs one set for all layers; choose a model of another kind"
        )
    kind = found.get("rope_type", found.get("type", "default"))
    theta = float(found.get("rope_theta", entries["rope_theta"]))
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor = {found['partial_rotary_factor']}; needs 1.0")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"{where}: rope type {kind!r}; needs default or llama3; choose a model whose positions are not stretched so"
        )
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if key not in found:
            raise CheckpointError(f"{where}: rope type llama3 without {key}; needs the number; correct the file")
    return theta, RopeScaling(
        factor=float(found["factor"]),
        low_freq_factor=float(found["low_freq_factor"]),
        high_freq_factor=float(found["high_freq_factor"]),
        original_max_positions=int(found.get("original_max_position_embeddings", max_positions)),
    )


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
