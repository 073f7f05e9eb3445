"""Tiny engines on SGLang, with weights brought in by SGLang's own loader, apart from the project's."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

from rlhf.config.rollout import RolloutConfig
from rlhf.families.registry import spec_of
from rlhf.rollout.sglang.engine import SGLangEngine
from tests.rollout.sglang.errands import LoadWhole
from tests.rollout.tiny import CPU

needs_sglang = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="needs SGLang (scripts/setup.sh test sglang)"
    ),
]


def make_engine(model: transformers.PreTrainedModel, folder: Path, **settings: object) -> SGLangEngine:
    """One rank's engine for the model, with random weights; `settings` go to RolloutConfig or to the engine."""
    names = ("eos_token_ids", "on_progress", "run_seed", "performance", "decode")
    own = {k: settings.pop(k) for k in names if k in settings}
    torch.set_num_threads(1)
    return SGLangEngine(
        spec_of(model.config.to_dict(), where="tiny"),
        RolloutConfig(**{"engine": "sglang", "kv_cache_tokens": 4096, **settings}),
        tp_group=None,
        cpu_group=None,
        device=CPU,
        dtype=torch.float32,
        log_folder=folder,
        **{"run_seed": 11, "eos_token_ids": (), **own},
    )


def load(engine: SGLangEngine, model: transformers.PreTrainedModel, folder: Path, *, version: int) -> None:
    """One whole update to the model's weights."""
    model.save_pretrained(folder)
    engine._entrance.port.begin_update()
    engine._entrance.port.load_window([LoadWhole(folder / "model.safetensors")])
    engine.weights_updated(version)
