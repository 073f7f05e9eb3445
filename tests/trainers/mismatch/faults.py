"""Faults of five kinds, planted where they would occur: in an engine, in what it answers, in the trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import PromptBatch, Rollout, Sequences
from rlhf.mcore import score
from rlhf.mcore.packing import PackedMicrobatch
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.native import model as native_model
from rlhf.rollout.native import sampler as native_sampler
from rlhf.trainers.mismatch.verdict import Cause
from tests.trainers.mismatch.bench import Bench, shifted


@dataclass
class Changed:
    """An engine whose requests or answers are changed on the way; all else is the engine's own."""

    engine: RolloutEngine
    ask: Callable[[SamplingConfig], SamplingConfig] = lambda sampling: sampling
    answer: Callable[[Rollout], Rollout] = lambda rollout: rollout

    def generate(self, prompts: PromptBatch | None, sampling: SamplingConfig) -> Rollout | None:
        rollout = self.engine.generate(prompts, self.ask(sampling))
        return None if rollout is None else self.answer(rollout)


@dataclass(frozen=True)
class Planted:
    """A fault in place."""

    engine: RolloutEngine
    """To be asked instead of the bench's."""
    what: str


Plant = Callable[[Bench, Random, pytest.MonkeyPatch], Planted]


def _of(bench: Bench, who: str, changed: Changed) -> Changed:
    """The changed engine, where this rank's is among the faulty ones."""
    last = bench.rank in bench.rollout.engines[-1]
    return changed if who == "all" or last else Changed(bench.engine)


# Weights


def one_tensor(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """A tensor of one engine is not what was sent."""
    names = sorted(name for name in bench.engine.params() if "k_norm" not in name and "bias" not in name)
    name, rank, kind = draw.choice(names), draw.choice(bench.leaders), draw.choice(["scaled", "mixed", "rolled"])
    if bench.rank == rank:
        param = bench.engine.params()[name]
        if kind == "scaled":
            param.mul_(1.3)
        elif kind == "mixed":
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(3)).to(param) * 0.1)
        else:
            param.copy_(param.roll(1, 0))
    bench.engine.weights_updated(bench.version)
    return Planted(bench.engine, f"{name} of rank {rank} {kind}")


def an_update_lost(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """The engines say that they have the new version, and hold the old weights."""
    kept = {name: param.clone() for name, param in bench.engine.params().items()}
    bench.randomise(draw.randrange(2**31))
    bench.sync()
    for name, param in bench.engine.params().items():
        param.copy_(kept[name])
    bench.engine.weights_updated(bench.version)
    return Planted(bench.engine, "an update lost")


# Sampling


def other_temperature(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """The engine draws and reports at another temperature than it is asked for, perhaps one engine of several."""
    factor, who = draw.choice([0.5, 0.7, 0.85, 0.98, 1.005, 1.03, 1.2, 1.5, 2.0]), draw.choice(["all", "last"])
    ask = Changed(bench.engine, ask=lambda s: replace(s, temperature=s.temperature * factor))
    return Planted(_of(bench, who, ask), f"temperature x {factor} of {who}")


def renormalised(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """The engine reports log-probs of what its cuts leave; cuts of its own, or those that were asked for."""
    own = draw.choice([{}, {"top_p": 0.8}, {"top_k": 8}, {"top_p": 0.93}, {"top_k": 20, "top_p": 0.9}])
    sample = native_sampler.sample

    def cut(logits: Tensor, vocab_size: int, uniforms: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
        real = logits[:, :vocab_size].float() / sampling.temperature
        tokens, logprobs = sample(logits, vocab_size, uniforms, sampling)
        probs = real.softmax(1).sort(1, descending=True).values
        if sampling.top_k:
            probs[:, sampling.top_k :] = 0.0
        total = probs.sum(1, keepdim=True)
        probs = probs.where(probs.cumsum(1) - probs < sampling.top_p * total, 0.0)
        return tokens, logprobs - probs.sum(1).log().to(logprobs)

    patch.setattr("rlhf.rollout.native.decoder.sample", cut)
    engine = Changed(bench.engine, ask=lambda s: replace(s, **(own or {"top_p": min(s.top_p, 0.9)})))
    return Planted(engine, f"renormalised {own}")


# Places


def neighbours(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """The engine's log-probs are moved by one token, perhaps those of one engine of several."""
    by, who = draw.choice([-1, 1]), draw.choice(["all", "last"])

    def moved(rollout: Rollout) -> Rollout:
        return replace(rollout, rollout_logprobs=shifted(rollout.rollout_logprobs, by))

    return Planted(_of(bench, who, Changed(bench.engine, answer=moved)), f"moved by {by} of {who}")


# Packing


def boundaries_wrong(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """Packed sequences of the trainer see tokens of the one before: a boundary is missing, or all are early."""
    pack, kind = score.pack, draw.choice(["missing", "early"])

    def faulty(sequences: Sequences, **kwargs: Any) -> PackedMicrobatch:
        packed = pack(sequences, **kwargs)
        ends = packed.params.cu_seqlens_q
        inner = ends[1:-1][1::2] if kind == "missing" else ends[1:-1] - 1
        packed.params.cu_seqlens_q = packed.params.cu_seqlens_kv = torch.cat([ends[:1], inner, ends[-1:]])
        packed.params.max_seqlen_q = packed.params.max_seqlen_kv = packed.tokens.numel()
        return packed

    patch.setattr(score, "pack", faulty)
    return Planted(bench.engine, f"trainer: boundaries {kind}")


def padded_rows_seen(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """Each row of the engine's batch looks back as far as the longest one does."""
    attention = native_model._cached_attention

    def leaking(queries, keys, values, mask):
        return attention(queries, keys, values, mask.amax(0, keepdim=True).expand_as(mask))

    patch.setattr(native_model, "_cached_attention", leaking)
    return Planted(bench.engine, "engine: rows see padding")


# Kernels


def rounded_attention(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """The engine's attention rounds what it gives, or what it is given, to bfloat16."""
    attention, which = native_model._cached_attention, draw.choice(["out", "values", "all"])

    def coarse(tensor):
        return tensor.bfloat16().to(tensor)

    def rounded(queries, keys, values, mask):
        if which == "out":
            return coarse(attention(queries, keys, values, mask))
        if which == "values":
            return attention(queries, keys, coarse(values), mask)
        return coarse(attention(coarse(queries), coarse(keys), coarse(values), mask))

    patch.setattr(native_model, "_cached_attention", rounded)
    return Planted(bench.engine, f"attention rounded: {which}")


def rounded_logits(bench: Bench, draw: Random, patch: pytest.MonkeyPatch) -> Planted:
    """The engine's output layer works in bfloat16."""
    sample = native_sampler.sample
    patch.setattr("rlhf.rollout.native.decoder.sample", lambda logits, *rest: sample(logits.bfloat16().float(), *rest))
    return Planted(bench.engine, "logits rounded")


FAULTS: dict[Cause, tuple[Plant, ...]] = {
    Cause.WEIGHTS: (one_tensor, an_update_lost),
    Cause.SAMPLING: (other_temperature, renormalised),
    Cause.SHIFT: (neighbours,),
    Cause.PACKING: (boundaries_wrong, padded_rows_seen),
    Cause.KERNELS: (rounded_attention, rounded_logits),
}


@contextmanager
def planted(plant: Plant, bench: Bench, draw: Random) -> Iterator[Planted]:
    """A fault, until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        yield plant(bench, draw, patch)
