"""What a converted checkpoint says in our Megatron model, and what transformers says of the other side. In float32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch import Tensor

from rlhf.checkpoint.convert.hf import HfWeights
from rlhf.checkpoint.convert.ranks import TIMEOUT_S
from rlhf.checkpoint.convert.sources import Wanted, Weights
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, LogicalTensor, ModelSpec
from rlhf.reshard.layout import Box

PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "Question: What is 17 times 3?\nAnswer:",
    "0 1 1 2 3 5 8 13 21",
)
"""Short, of different kinds: prose, code, a question, numbers."""

TOLERANCE = 1e-4
"""Of the largest logit: float32 in two orders of summation through some tens of layers is off by 1e-6 to 1e-5 of it; a
norm's epsilon, rotary base or head that is read wrongly changes logits by 1e-2 of it and more."""

_COPIES = 2
"""Models in memory at a time, float32."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Logits of two models for the same tokens."""

    num_prompts: int
    num_tokens: int
    largest_logit: float
    largest_difference: float
    same_choices: int
    """Tokens after which both hold the same next one for the most likely."""

    @property
    def is_same(self) -> bool:
        """Whether they agree as far as float32 can tell; of two tokens that are as likely either may come first."""
        return self.largest_difference <= TOLERANCE * self.largest_logit


def why_not(first: Weights, second: Weights) -> str:
    """Why logits cannot be compared; empty if they can."""
    if not any(isinstance(side, HfWeights) for side in (first, second)):
        return "neither side is a Hugging Face folder, which transformers could load"
    if first.head is not Head.LM:
        return "the model has a value head"
    needed = _COPIES * 4 * sum(Box.of(*((0, n) for n in one.shape)).num_elements for one in _tensors(first.spec))
    there = psutil.virtual_memory().available
    if needed > 0.8 * there:
        return f"two float32 models take {needed / 2**30:.1f} GiB, {there / 2**30:.1f} GiB of memory are free"
    return ""


def compare_logits(first: Weights, second: Weights, *, cast: str = "") -> Parity | None:
    """The Hugging Face folder among the two by transformers, the other side by our Megatron model, on the first rank.

    With `cast`, both sides compute in float32 with weights that were cast to that dtype first. Collective over the job,
    which has a process group; ranks but the first get None. See `why_not` first.
    """
    from rlhf.mcore.logits import logits_on_first_rank  # noqa: PLC0415  # imports Megatron, seconds

    reference, other = (first, second) if isinstance(first, HfWeights) else (second, first)
    rows = tokens_of(reference.path, reference.spec)
    timeout = timedelta(seconds=TIMEOUT_S)
    dtype = getattr(torch, cast) if cast else None
    found = logits_on_first_rank(other.spec, _slices_of(other, dtype), rows, where=str(other.path), timeout=timeout)
    if found is None:
        return None
    return parity(_by_transformers(reference.path, rows, dtype), found)


def parity(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Parity:
    """Of logits [T, vocabulary] for each prompt. What is not a number anywhere makes the largest none."""
    pairs = list(zip(expected, found, strict=True))
    return Parity(
        num_prompts=len(pairs),
        num_tokens=sum(len(one) for one in expected),
        largest_logit=_largest(expected),
        largest_difference=_largest([a - b for a, b in pairs]),
        same_choices=sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs),
    )


def _largest(ones: Sequence[Tensor]) -> float:
    """Absolute; nan as soon as there is one, which Python's max would pass over."""
    return float(torch.stack([one.abs().max() for one in ones]).max())


def tokens_of(folder: Path, spec: ModelSpec) -> list[Tensor]:
    """Token ids int64 [T] of a few prompts; drawn ones where the folder has no tokenizer."""
    from transformers import AutoTokenizer  # noqa: PLC0415  # seconds that other commands need not wait for

    if any(folder.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        rows = [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64) for text in PROMPTS]
        if all(len(row) > 1 and int(row.max()) < spec.vocab_size for row in rows):
            return rows
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, spec.vocab_size, (count,), generator=generator) for count in (5, 9, 13, 17)]


def _by_transformers(folder: Path, rows: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one wants sizes that are multiples of 16 bytes
    with torch.no_grad():
        for param in model.parameters() if dtype else ():
            param.copy_(param.to(dtype))
        return [model(row[None]).logits[0, :-1] for row in rows]


def _slices_of(weights: Weights, dtype: torch.dtype | None) -> Callable[[LogicalTensor, Box], Tensor]:
    def slice_of(tensor: LogicalTensor, box: Box) -> Tensor:
        block = torch.empty(box.shape, dtype=weights.dtypes[tensor.name])
        weights.read([Wanted(tensor.name, box, block)])
        return block if dtype is None else block.to(dtype)

    return slice_of


def _tensors(spec: ModelSpec) -> tuple[LogicalTensor, ...]:
    return logical_tensors(spec, head=Head.LM)
