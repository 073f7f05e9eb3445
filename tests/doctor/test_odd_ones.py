"""Which of several ranks is named, on faked ones, and how it is told."""

from dataclasses import replace

from rlhf.doctor.examination import Examination, HostFacts, steering
from rlhf.doctor.finding import Finding, Level, ok, warning
from rlhf.doctor.odd_ones import odd_clocks, odd_ones, spans
from rlhf.doctor.report import report
from tests.doctor.test_machine import GIB, GPUS, H200, LIMITS, SOFT, STORAGE, WIRES
from tests.doctor.test_versions import GOOD

FACTS = HostFacts(versions=GOOD, devices=GPUS, wires=WIRES, storage=STORAGE)
HOST = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}


def job() -> list[Examination]:
    """Six ranks on three hosts; the first of each host has looked at it."""
    plain = Examination(
        rank=0, host="a", limits=LIMITS, environment={"NCCL_DEBUG": "WARN"}, python="/venv/python", host_facts=FACTS
    )
    return [replace(plain, rank=r, host=HOST[r], host_facts=None if r % 2 else FACTS) for r in range(6)]


def only(examinations: list[Examination]) -> Finding:
    (finding,) = odd_ones(examinations)
    assert finding.subject == "nodes"
    return finding


def test_equal_ranks_are_well() -> None:
    assert odd_ones(job()) == []


def test_the_host_with_another_version_is_named() -> None:
    ranks = job()
    other = replace(GOOD, installed={**GOOD.installed, "torch": "2.9"})
    ranks[4] = replace(ranks[4], host_facts=replace(FACTS, versions=other))
    finding = only(ranks)
    assert finding.level == Level.ERROR
    assert finding.found == "torch is 1.0+cpu on 2 of 3, but on host c (rank 4): 2.9"


def test_the_host_with_fewer_gpus_is_named() -> None:
    ranks = job()
    ranks[2] = replace(ranks[2], host_facts=replace(FACTS, devices=replace(GPUS, gpus=(H200,) * 3)))
    assert only(ranks).found == "GPUs is 4 H200 on 2 of 3, but on host b (rank 2): 3 H200"


def test_the_rank_with_another_limit_or_environment_is_named() -> None:
    ranks = job()
    ranks[3] = replace(ranks[3], limits=replace(LIMITS, soft={**SOFT, "nofile": 1024}))
    assert only(ranks).found == "ulimit nofile is 65536 on 5 of 6, but on host b (rank 3): 1024"
    ranks = job()
    ranks[5] = replace(ranks[5], environment={})
    assert only(ranks).found == "$NCCL_DEBUG is WARN on 5 of 6, but on host c (rank 5): not there"
    assert only(ranks).level == Level.WARNING


def test_without_a_majority_all_are_named() -> None:
    ranks = job()[:4]
    for rank in (2, 3):
        ranks[rank] = replace(ranks[rank], limits=replace(LIMITS, memory_bytes=32 * GIB))
    assert only(ranks).found == "memory differs: host a (ranks 0-1): 64 GiB; host b (ranks 2-3): 32 GiB"


def test_the_clock_that_departs_is_named() -> None:
    assert odd_clocks([0.0, 0.01, -0.3, 0.2], HOST) == []
    (finding,) = odd_clocks([0.0, 7.5, 7.4, 7.5], HOST)  # rank 0 is the odd one
    assert finding.found == "host a (rank 0) is -7.5 s off"


def test_ranks_are_counted_in_spans() -> None:
    assert [spans(ranks) for ranks in ([3], [0, 1, 2], [7, 0, 1, 3])] == ["rank 3", "ranks 0-2", "ranks 0-1, 3, 7"]


def test_only_variables_that_steer_a_run_are_compared_and_no_secret_is() -> None:
    given = {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "s3cret",
        "WANDB_API_KEY": "s3cret",
        "HOME": "/root",
        "OMP_NUM_THREADS": "2",
    }
    given |= {"TORCHELASTIC_RUN_ID": "x", "TOKENIZERS_PARALLELISM": "false", "LD_LIBRARY_PATH": "/lib"}
    assert set(steering(given)) == {"NCCL_DEBUG", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "LD_LIBRARY_PATH"}


def test_equal_findings_are_told_once() -> None:
    low = warning("limits", "few files", "ulimit -n")
    text = report({0: [ok("disk", "runs: much")], 1: [low], 2: [low]}, [], HOST | {0: "z"})
    assert text.splitlines() == [
        "doctor: 6 rank(s) on 4 host(s)",
        "ok       disk      [rank 0] runs: much",
        "warning  limits    [ranks 1-2] few files",
        "                   -> ulimit -n",
        "doctor: 0 errors, 1 warning",
    ]
    assert report({0: []}, [], {0: "a"}).endswith("doctor: all is well\n")
