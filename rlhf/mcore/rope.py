"""Rotary frequencies of a model, with Llama 3 scaling of any factors (upstream's factors are fixed)."""

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
