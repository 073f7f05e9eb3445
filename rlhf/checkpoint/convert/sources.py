"""Weights at rest, in whatever format: what a conversion reads.

A format is one implementation of `Weights`; conversions and proofs know no other door to a checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rlhf.errors import CheckpointError
from rlhf.families.registry import family_of, logical_tensors
from rlhf.families.spec import Head, ModelSpec, Part
from rlhf.reshard.layout import Box


class Place(Enum):
    """What stands between a checkpoint's tensors and the logical ones, one tensor at a time."""

    PADDED = "padded"
    """Stored with more rows than the model has."""
    TIED = "tied"
    """Not stored: it is another tensor."""
    REPLICATED = "replicated"
    """Held whole by several ranks of the layout, stored once."""
    DROPPED = "dropped"
    """Stored, and no weight of the model."""


@dataclass(frozen=True, slots=True)
class Remark:
    """One tensor that is not simply the same bytes under another name."""

    place: Place
    tensor: str
    why: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block of a logical tensor and the memory it is to be written to."""

    tensor: str
    box: Box
    into: Tensor
    """Of the box's shape, any strides; of another dtype than the stored one only if a cast is meant."""


def tied_remark(spec: ModelSpec, head: Head) -> tuple[Remark, ...]:
    """Of the lm head that is the embedding, in a model that ties them."""
    if not spec.tied_embeddings or head is Head.VALUE:
        return ()
    embedding = next(tensor.name for tensor in logical_tensors(spec, head=head) if tensor.part is Part.EMBED)
    return (Remark(Place.TIED, family_of(spec).lm_head.name, f"is {embedding}"),)


class Weights(Protocol):
    """The weights of one model in a checkpoint folder, opened: names, shapes and dtypes are known to be right."""

    @property
    def path(self) -> Path:
        """The folder."""

    @property
    def kind(self) -> str:
        """The format, in words."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""

    @property
    def head(self) -> Head:
        """What its last tensor is."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtype of each logical tensor, in the order of the forward pass."""

    @property
    def hf_files(self) -> Path | None:
        """Folder with config.json, tokenizer and the like of the model; None where there is none."""

    @property
    def args_spec(self) -> ModelSpec | None:
        """The model according to Megatron-LM's args in the folder, where there are any."""

    @property
    def told_by(self) -> tuple[str, ...]:
        """Options of the command line that may say something about it: `--role`, `--config-from`."""

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What of the folder is not one stored tensor for each logical one."""

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill the given memory. What lies together in a file is best asked for in one call.

        Raises:
            CheckpointError: The file is damaged.
        """


def common_dtype(weights: Weights, asked: str) -> torch.dtype:
    """The dtype to write all tensors in: the one asked for, or the one they all have.

    Args:
        weights: What is converted.
        asked: Name of a dtype; empty keeps the bits as they are.

    Raises:
        CheckpointError: The tensors differ in dtype and none was asked for.
    """
    if asked:
        found = getattr(torch, asked)
        assert isinstance(found, torch.dtype), asked
        return found
    first, *others = weights.dtypes.items()
    for name, dtype in others:
        if dtype != first[1]:
            raise CheckpointError(
                f"{weights.path}: {first[0]} is {_name(first[1])} and {name} is {_name(dtype)}; needs one dtype for "
                "all tensors, since a cast would change bits unasked; say which with --dtype"
            )
    return first[1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
