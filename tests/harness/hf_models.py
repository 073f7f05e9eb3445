"""What tiny transformers models of several test packages have in common."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # ranks that only read the checkpoints need not wait for the import
    import transformers

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 731.0,
    "factor": 3.7,
    "low_freq_factor": 1.3,
    "high_freq_factor": 2.9,
    "original_max_position_embeddings": 17,
}
"""Unusual factors, with bands of kept, blended and divided frequencies inside 16 channels and more."""


def move_from_initial_values(model: "transformers.PreTrainedModel") -> None:
    """Add noise to biases and norms, which start at 0 and 1 and would hide a mistake."""
    with torch.no_grad():
        for key, param in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                param.add_(torch.randn_like(param) * 0.3)
