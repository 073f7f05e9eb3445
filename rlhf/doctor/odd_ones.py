"""Which rank or host differs from the others, in what should be the same on all."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rlhf.doctor.examination import Examination
from rlhf.doctor.finding import Finding, Level, warning

MUST_BE_EQUAL = frozenset(
    {"python", "torch", "megatron-core", "transformers", "tokenizers", "numpy", "transformer-engine", "apex"}
    | {"flash-attn", "sglang", "GPUs", "CUDA of torch"}
)
"""Another version or device computes something else: an error. Anything else that differs is a warning."""
CLOCK_S = 1.0
"""Hosts that keep time by NTP agree to milliseconds; nothing here depends on it, but logs are read by it."""


def odd_ones(examinations: Sequence[Examination]) -> list[Finding]:
    """A finding for each thing that is not the same on all ranks, naming those that depart from the majority."""
    held: dict[str, dict[int, str]] = {}
    for examination in examinations:
        for name, value in examination.comparable.items():
            held.setdefault(name, {})[examination.rank] = value
    host_of = {examination.rank: examination.host for examination in examinations}
    looked = {examination.rank for examination in examinations if examination.host_facts is not None}
    found = []
    for name, values in held.items():
        by_rank = name.startswith(("$", "ulimit ", "memory", "interpreter"))
        everyone = set(host_of) if by_rank else looked
        whole = {rank: values.get(rank, "not there") for rank in sorted(everyone)}
        if len(set(whole.values())) > 1:
            found.append(_finding(name, whole, host_of))
    return found


def _finding(name: str, values: Mapping[int, str], host_of: Mapping[int, str]) -> Finding:
    counts = Counter(values.values()).most_common()
    usual, many = counts[0]
    level = Level.ERROR if name in MUST_BE_EQUAL else Level.WARNING
    groups = {value: [rank for rank, held in values.items() if held == value] for value, _ in counts}
    if 2 * many > len(values):
        odd = "; ".join(f"{_who(groups[value], host_of)}: {value}" for value, _ in counts[1:])
        text = f"{name} is {usual} on {many} of {len(values)}, but on {odd}"
    else:
        text = f"{name} differs: " + "; ".join(f"{_who(ranks, host_of)}: {value}" for value, ranks in groups.items())
    return Finding(level=level, subject="nodes", found=text, cure="make it the same on all of them")


def _who(ranks: Sequence[int], host_of: Mapping[int, str]) -> str:
    """`host b (rank 3)`, `host b (ranks 4-7)`, by host."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(host_of[rank], []).append(rank)
    return ", ".join(f"host {host} ({spans(own)})" for host, own in by_host.items())


def spans(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    ordered, parts = sorted(ranks), []
    while ordered:
        run = next((n for n in range(1, len(ordered)) if ordered[n] != ordered[0] + n), len(ordered))
        parts.append(str(ordered[0]) if run == 1 else f"{ordered[0]}-{ordered[run - 1]}")
        ordered = ordered[run:]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def odd_clocks(offsets_s: Sequence[float], host_of: Mapping[int, str]) -> list[Finding]:
    """Ranks whose clock departs from the middle one.

    Args:
        offsets_s: Of each rank's clock, seconds against rank 0's.
        host_of: Rank -> host.
    """
    middle = sorted(offsets_s)[len(offsets_s) // 2]
    odd = {rank: offset - middle for rank, offset in enumerate(offsets_s) if abs(offset - middle) > CLOCK_S}
    return [
        warning("clock", f"{_who([rank], host_of)} is {offset:+.1f} s off", "run chrony or another NTP client there")
        for rank, offset in odd.items()
    ]
