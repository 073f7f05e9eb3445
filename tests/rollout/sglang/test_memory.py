"""Errands that give back a scheduler's memory and take it again, on a stand-in for it; no SGLang is needed."""

import os
from types import SimpleNamespace

import pytest
import torch

from rlhf.rollout.sglang.memory import KV_CACHE, WEIGHTS, GiveBack, TakeAgain, used_bytes
from tests.rollout.tiny import CPU


class Scheduler:
    """As much of SGLang's as the errands use: a model with tied weights and a rotary table, and a pool."""

    def __init__(self) -> None:
        self.idle = True
        model = torch.nn.Module()
        model.embed = torch.nn.Parameter(torch.ones(7, 5))
        model.head = torch.nn.Parameter(model.embed.data)
        model.norm = torch.nn.Parameter(torch.ones(5))
        model.register_buffer("cos_sin_cache", torch.arange(6.0), persistent=False)
        pool = SimpleNamespace(k_buffer=[torch.ones(3, 2)] * 2, v_buffer=[torch.ones(3, 2)], moved=0)
        pool._init_data_ptrs_and_strides = lambda: setattr(pool, "moved", pool.moved + 1)
        self.model, self.pool = model, pool
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model, token_to_kv_pool=pool))

    def is_fully_idle(self) -> bool:
        return self.idle


def test_weights_and_cache_go_by_themselves_and_come_back_as_zeros_in_the_same_tensors():
    scheduler = Scheduler()
    embed, keys = scheduler.model.embed, scheduler.pool.k_buffer[0]
    assert GiveBack((KV_CACHE,)).run_in(scheduler) == 2 * 6 * 4  # what is in two lists, or twice in one, counts once
    assert (keys.untyped_storage().nbytes(), embed.untyped_storage().nbytes()) == (0, 7 * 5 * 4)
    assert GiveBack((WEIGHTS,)).run_in(scheduler) == (7 * 5 + 5) * 4
    assert embed.untyped_storage().nbytes() == 0
    assert torch.equal(scheduler.model.cos_sin_cache, torch.arange(6.0))
    assert TakeAgain((WEIGHTS,)).run_in(scheduler) == (7 * 5 + 5) * 4
    assert scheduler.pool.moved == 0
    assert TakeAgain((KV_CACHE,)).run_in(scheduler) == 2 * 6 * 4
    assert scheduler.pool.moved == 1
    assert not embed.any()
    assert not keys.any()
    embed.data.fill_(3.0)
    assert scheduler.model.head.eq(3.0).all()  # still tied
    assert TakeAgain((WEIGHTS, KV_CACHE)).run_in(scheduler) == 0


def test_nothing_is_given_back_while_requests_run():
    scheduler = Scheduler()
    scheduler.idle = False
    with pytest.raises(RuntimeError, match="requests are running"):
        GiveBack((KV_CACHE,)).run_in(scheduler)
    assert scheduler.pool.k_buffer[0].untyped_storage().nbytes()


def test_a_pool_of_another_kind_is_named():
    scheduler = Scheduler()
    scheduler.tp_worker.model_runner.token_to_kv_pool = SimpleNamespace()
    with pytest.raises(RuntimeError, match="SimpleNamespace"):
        GiveBack((KV_CACHE,)).run_in(scheduler)


def test_memory_is_measured_from_outside():
    before = used_bytes(CPU, [os.getpid()])
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert used_bytes(CPU, [os.getpid()]) - before > 60 * 2**20
    del block
    assert used_bytes(CPU, [2**22 + 1]) == 0  # no such process
