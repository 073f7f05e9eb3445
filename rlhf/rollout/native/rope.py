"""Rotary position embedding: frequencies of a model, tables of cosines and sines, and their application."""

from math import pi

import torch
from torch import Tensor

from rlhf.families.spec import ModelSpec


def rotary_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair of channels, float32 [head_dim / 2].

    Source: `_compute_llama3_parameters` of transformers, from Llama 3.1: low frequencies are divided by the factor,
    high ones stay, those between are blended.
    """
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


def rotary_table(spec: ModelSpec, num_positions: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[num_positions, 2, 1, head_dim]: cosines, and sines with the sign of the first half turned round."""
    angles = torch.outer(torch.arange(num_positions).float(), rotary_frequencies(spec))
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    return torch.stack([cos, sin], 1).unsqueeze(2).to(device, dtype)


def rotate_(heads: Tensor, table: Tensor) -> None:
    """Turn heads [rows, heads, head_dim] in place by the table's rows [rows, 2, 1, head_dim]."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(table[:, 0]).addcmul_(swapped, table[:, 1])
