import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = """
import sys, types, torch
before = torch.compile
from megatron_patches.first_import import import_megatron
assert not any(name.startswith("megatron.") for name in sys.modules), "first_import must come before Megatron"
import_megatron()
from megatron.core.fusions.fused_bias_swiglu import swiglu
assert torch.compile is before
assert isinstance(swiglu, types.FunctionType) and swiglu.__module__.endswith("fused_bias_swiglu"), swiglu
assert "torch._inductor.compile_fx" not in sys.modules
assert swiglu(torch.ones(2, 6)).shape == (2, 3)
assert not any(name.split(".")[0] in ("wandb", "tensorboard") for name in sys.modules)
from torch.utils.tensorboard import SummaryWriter
import wandb
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the fused functions are compiled")
def test_functions_stay_as_written_torch_keeps_its_compiler_and_loggers_are_not_imported() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], check=True, cwd=root)
