"""What the doctor says, as text: one line a finding, those of equal hosts told once."""

from collections.abc import Mapping, Sequence

from rlhf.doctor.finding import Finding, Level
from rlhf.doctor.odd_ones import spans

ORDER = ("versions", "devices", "network", "memory", "disk", "limits", "clock", "nodes")


def report(findings: Mapping[int, Sequence[Finding]], about_all: Sequence[Finding], host_of: Mapping[int, str]) -> str:
    """The table.

    Args:
        findings: Rank -> what was found there.
        about_all: What was found by comparing ranks.
        host_of: Rank -> host.
    """
    told: dict[Finding, list[int]] = {}
    for rank, own in findings.items():
        for finding in own:
            told.setdefault(finding, []).append(rank)
    rows = [(finding, _where(ranks, host_of)) for finding, ranks in told.items()]
    rows += [(finding, "") for finding in about_all]
    rows.sort(key=lambda row: ORDER.index(row[0].subject))
    lines = [f"doctor: {len(host_of)} rank(s) on {len(set(host_of.values()))} host(s)"]
    for finding, where in rows:
        lines.append(f"{finding.level.name.lower():8} {finding.subject:9} {where}{finding.found}")
        if finding.cure:
            lines.append(f"{'':18} -> {finding.cure}")
    every = [finding for finding, _ in rows]
    return "\n".join(lines) + f"\n{verdict(every)}\n"


def _where(ranks: Sequence[int], host_of: Mapping[int, str]) -> str:
    return f"[{spans(ranks)}] " if len(host_of) > 1 else ""


def verdict(findings: Sequence[Finding]) -> str:
    """`doctor: 1 error, 2 warnings`, or that all is well."""
    errors = sum(finding.level == Level.ERROR for finding in findings)
    warnings = sum(finding.level == Level.WARNING for finding in findings)
    if not errors and not warnings:
        return "doctor: all is well"
    return f"doctor: {errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
