"""Whether two checkpoints hold the same model: configs, every tensor bit by bit, and what the model says."""

from dataclasses import asdict, dataclass

from rlhf.checkpoint.convert.outcome import listed, remarks_json
from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.sources import Weights
from rlhf.checkpoint.verify.config import Row, compare_configs
from rlhf.checkpoint.verify.logits import Parity, compare_logits, why_not
from rlhf.checkpoint.verify.tensors import Compared, compare_tensors

LISTED = 20
"""Differences that a table names one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a comparison found, on the leading process."""

    first: Weights
    second: Weights
    configs: tuple[Row, ...]
    tensors: Compared
    logits: Parity | None
    no_logits: str
    """Why logits were not compared; empty if they were."""

    @property
    def is_same(self) -> bool:
        """Whether there is no difference."""
        is_told_alike = all(row.is_same for row in self.configs)
        return is_told_alike and not self.tensors.differences and (self.logits is None or self.logits.is_same)

    def text(self) -> str:
        """A table for the console."""
        different = [row for row in self.configs if not row.is_same]
        lines = [f"A  {self.first.path} ({self.first.kind})", f"B  {self.second.path} ({self.second.kind})"]
        lines.append(f"config   {len(self.configs)} settings and files, {_number(len(different))}")
        lines += [f"  {row.name}: {row.first} against {row.second}" for row in different]
        found = self.tensors
        lines.append(
            f"tensors  {found.num_tensors}, {found.num_bytes:,} bytes compared, {_number(len(found.differences))}"
        )
        lines += [f"  {one.tensor}: {one.what}" for one in found.differences[:LISTED]]
        if len(found.differences) > LISTED:
            lines.append(f"  and {len(found.differences) - LISTED} more")
        if self.logits is None:
            lines.append(f"logits   not compared: {self.no_logits}")
        else:
            lines.append(
                f"logits   {self.logits.num_prompts} prompts, {self.logits.num_tokens} tokens: largest difference "
                f"{self.logits.largest_difference:.2g} of logits up to {self.logits.largest_logit:.3g}, same most "
                f"likely token after {self.logits.same_choices}"
            )
        for name, side in (("A", self.first), ("B", self.second)):
            if side.remarks:
                lines += [f"not one to one in {name}:", *listed(side.remarks)]
        return "\n".join([*lines, "the same model" if self.is_same else "NOT THE SAME"])

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "same": self.is_same,
            **{
                name: {"path": str(side.path), "kind": side.kind, **remarks_json(side.remarks)}
                for name, side in (("a", self.first), ("b", self.second))
            },
            "config": [{**asdict(row), "same": row.is_same} for row in self.configs],
            "tensors": asdict(self.tensors),
            "logits": None if self.logits is None else {**asdict(self.logits), "same": self.logits.is_same},
            "no_logits": self.no_logits,
        }


def verify(first: Weights, second: Weights, crew: Crew, *, cast: str, with_logits: bool) -> Verdict:
    """Compare two checkpoints. Collective over the crew.

    Args:
        first: One side.
        second: The other.
        crew: The processes.
        cast: See `compare_tensors`; logits are compared after it too.
        with_logits: Compare logits where it is possible.

    Raises:
        CheckpointError: A file of either side is damaged.
    """
    tensors = compare_tensors(first, second, crew, cast=cast)
    configs = crew.together(lambda: compare_configs(first, second))
    reason = "not asked for"
    if with_logits:
        reason = next(iter(reason for reason in crew.all(_why_not(first, second, tensors)) if reason), "")
    logits = None if reason else compare_logits(first, second, cast=cast)
    return Verdict(first=first, second=second, configs=configs, tensors=tensors, logits=logits, no_logits=reason)


def _why_not(first: Weights, second: Weights, tensors: Compared) -> str:
    shapes = [one for one in tensors.differences if "shape" in one.what or "no such" in one.what]
    return "the tensors do not match" if shapes else why_not(first, second)


def _number(count: int) -> str:
    return "no difference" if count == 0 else f"{count} DIFFERENT"
