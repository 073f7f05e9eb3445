"""Logits, log-probs and gradients equal transformers' in every layout, without Megatron's global parallel state.

One spawn of four ranks for all layouts, since each rank pays Megatron's import.
"""

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head
from rlhf.mcore.layer_spec import prepare_megatron
from tests.harness.ranks import run_ranks
from tests.mcore.check_gradients import check_all_gradients, expected_gradients, forbid_parallel_state
from tests.mcore.check_logits import check_all_logits, expected_logits
from tests.mcore.tiny import CASES, make_checkpoint


def check_rank(root: Path) -> None:
    torch.set_num_threads(1)
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    prepare_megatron(torch.device("cpu"))  # before names change, for patches look at what they replace
    forbid_parallel_state()
    check_all_logits(root, factory)
    check_all_gradients(root, factory)


@pytest.mark.dist
def test_models_equal_transformers_in_every_layout_without_the_global_state(tmp_path: Path) -> None:
    for case in CASES:
        model = make_checkpoint(case, tmp_path / case)
        torch.save(expected_logits(model), tmp_path / f"{case}.logits.pt")
        head = Head.VALUE if case == "llama" else Head.LM
        folder = tmp_path / case
        if head is Head.VALUE:
            folder = tmp_path / f"{case}.reward"
            make_checkpoint(case, folder, num_labels=1)
        torch.save(expected_gradients(folder, head), tmp_path / f"{case}.grads.pt")
    run_ranks(4, check_rank, tmp_path)
