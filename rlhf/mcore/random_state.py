"""States of all random generators that a rank draws from: Python's, NumPy's, torch's, and each model's own."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlhf.errors import CheckpointError
from rlhf.mcore.model import MegatronModel


def rng_state(models: Mapping[str, MegatronModel]) -> dict[str, Any]:
    """This rank's states; `torch.load` reads them back with `weights_only`. Local.

    Args:
        models: By role, those that have a part on this rank.
    """
    version, numbers, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "numbers": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "place": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "models": {
            role: [{name: held.clone() for name, held in module._rng_states.items()} for module in model.modules]
            for role, model in models.items()
        },
    }
    if any(model.device.type == "cuda" for model in models.values()):
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any], models: Mapping[str, MegatronModel], *, where: str) -> None:
    """Go on drawing where `rng_state` was taken, on a rank that holds the same parts of the same models. Local.

    Raises:
        CheckpointError: The state is that of a rank with other models or another number of model chunks.
    """
    found = {role: len(chunks) for role, chunks in state["models"].items()}
    ours = {role: len(model.modules) for role, model in models.items()}
    if found != ours:
        raise CheckpointError(
            f"{where}: random states of models with chunks {found}, here {ours}; needs a rank of the same layout; "
            "resume with the layout that wrote it, or without random states"
        )
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    numbers = numpy["numbers"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", numbers, numpy["place"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    for role, model in models.items():
        for module, held in zip(model.modules, state["models"][role], strict=True):
            module._rng_states = {name: one.clone() for name, one in held.items()}
