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
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the fused functions are compiled")
def test_functions_stay_as_written_and_torch_keeps_its_compiler() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], check=True, cwd=root)
