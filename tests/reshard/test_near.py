"""Reading the memory of another process: what arrives, and what is said when the system refuses."""

import multiprocessing as mp
import os
from multiprocessing.connection import Connection

import torch

from rlhf.reshard.near import read_memory

COUNT = 300_001


def hold(pipe: Connection) -> None:
    """Tell where a tensor lies, and keep it until asked to go."""
    kept = torch.arange(COUNT, dtype=torch.float32)
    pipe.send((os.getpid(), kept.data_ptr()))
    pipe.recv()


def test_another_process_is_read_as_it_is_and_its_death_is_said():
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=hold, args=(theirs,))
    child.start()
    pid, address = ours.recv()
    into = torch.full((COUNT + 2,), -7.0)
    assert read_memory(pid, address, into[1:-1]) is None
    assert torch.equal(into[1:-1], torch.arange(COUNT, dtype=torch.float32))
    assert into[0] == into[-1] == -7.0
    assert read_memory(pid, 8, torch.zeros(4)) == "Bad address"
    ours.send("go")
    child.join()
    assert read_memory(pid, address, into[1:-1]) == "No such process"
