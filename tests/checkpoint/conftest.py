"""Tiny checkpoints of every family, made once."""

from pathlib import Path

import pytest

from tests.mcore.tiny import CASES, MOE_CASES, make_checkpoint


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each case of tests/mcore/tiny.py, and `reward`, a llama with a value head. Read only."""
    root = tmp_path_factory.mktemp("models")
    for case in (*CASES, *MOE_CASES):
        make_checkpoint(case, root / case)
    make_checkpoint("llama", root / "reward", num_labels=1)
    return root
