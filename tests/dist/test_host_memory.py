"""Freed memory stays with the process."""

import resource
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
from rlhf.dist.host_memory import keep_freed_memory
import torch
kept = keep_freed_memory() if {keep} else False
def churn():
    pieces = [torch.ones(5_000_000) for _ in range(20)]  # 20 MB each
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, keep: bool) -> tuple[int, int]:
    command = [sys.executable, "-c", COUNT_FAULTS.format(keep=keep)]
    kept, count = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(kept), int(count)


def test_a_second_pass_over_kept_memory_faults_on_few_pages():
    kept, count = faults(keep=True)
    pages = 20 * 20_000_000 // resource.getpagesize()
    assert kept or sys.platform != "linux"
    if not kept:
        pytest.skip("the C library is not glibc")
    assert count < pages / 5  # a tenth seen
    assert faults(keep=False)[1] > pages / 2  # all seen
