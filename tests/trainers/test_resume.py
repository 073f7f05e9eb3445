"""A run that is killed and started again ends as one that never was; in one process, whose parts are built anew."""

import io
import json
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf.build.loops import build_loop
from rlhf.checkpoint.manifest import read_manifest
from rlhf.config.load import load_config
from rlhf.dist.groups import GroupFactory
from rlhf.errors import CheckpointError, SaveError
from rlhf.preflight.checkpoint import saved_bytes
from rlhf.preflight.roles import model_roles
from rlhf.trainers.ppo import PPOLoop
from rlhf.trainers.run_record import RunRecord
from rlhf.trainers.sft import SFTLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here

STATEFUL = (  # each step depends on numbers that all earlier ones measured
    *("ppo.shaping.normalize=running", "ppo.value_loss.clip=relative", "eval.every_steps=3", "num_steps=6"),
    *("ppo.kl_controller={kind: adaptive, target: 0.05, horizon: 20}", "ppo.critic_warmup_steps=1"),
    *("actor.optim={lr: 3.0e-3, schedule: linear, decay_steps: 11}", "critic.optim.warmup_steps=5"),
    *("reference.model.init=actor", "actor.freeze=[model.layers.0.mlp.*]"),
)
ROWS = 15
"""11 beside those held out: of 5 prompts a step, the third and the fifth step end an epoch."""
SFT = """
name: sft
trainer: sft
num_steps: 4
actor: {{model: {{path: {model}}}, optim: {{lr: 3.0e-3}}}}
data: {{source: jsonl, path: {rows}, chat_template: false, max_prompt_tokens: 24, held_out: 4}}
sft: {{batch_samples: 5}}
job: {{device: cpu}}
log: {{folder: {folder}/runs, tensorboard: false, console: plain}}
"""


class KilledError(Exception):
    """Stands for kill -9: nothing of the run is tidied up."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run after another, in one process."""

    folder: Path
    groups: GroupFactory
    console: io.StringIO

    def said(self) -> str:
        """What the console has shown since it was asked last."""
        text = self.console.getvalue()
        self.console.truncate(0)
        self.console.seek(0)
        return text

    def loop(self, name: str, *overrides: str) -> PPOLoop:
        """Built as the command would."""
        config = load(self.folder, *STATEFUL, f"name={name}", *overrides)
        found = build_loop(config, ranks_here(self.run(name), self.groups))
        assert isinstance(found, PPOLoop)
        return found

    def sft(self, name: str, *overrides: str) -> SFTLoop:
        """The same of the other trainer."""
        config = load_config([str(self.folder / "sft.yaml"), f"name={name}", *overrides])
        found = build_loop(config, ranks_here(self.run(name), self.groups))
        assert isinstance(found, SFTLoop)
        return found

    def run(self, name: str) -> Path:
        """Folder of a run."""
        return self.folder / "runs" / name


def die_after(loop: PPOLoop, steps: int) -> None:
    """Run until so many steps are done; nothing of the end of a run happens."""
    ask, done = loop.reporter.stop_agreed, count(loop.start.step)

    def stop_agreed() -> bool:
        if next(done) == steps:
            loop.checkpoints._saver.wait()  # or it would go on writing in this process
            raise KilledError
        return ask()

    loop.reporter.stop_agreed = stop_agreed
    with pytest.raises(KilledError):
        loop.run()


def stop_after(loop: PPOLoop, run_folder: Path, steps: int) -> None:
    """Run until so many steps are done and a stop is requested."""
    ask, done = loop.reporter.stop_agreed, count(loop.start.step)

    def stop_agreed() -> bool:
        if next(done) == steps:
            (run_folder / "stop").touch()
        return ask()

    loop.reporter.stop_agreed = stop_agreed
    loop.run()
    (run_folder / "stop").unlink()


def state_of(loop: PPOLoop) -> dict[tuple, torch.Tensor]:
    """Weights, moments and masters, by what and where they are."""
    blocks = [block for role in loop.checkpoints._roles for block in role.blocks(own_share=True)]
    return {(block.key, block.box): block.data.clone() for block in blocks}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(path: Path) -> list[dict]:
    """Without clocks and, as the first sync after a start sends everything, without its bytes."""
    timed, sent = (
        ("time/", "rate/", "rollout/", "clock/"),
        ("sync/bytes", "sync/copied", "sync/node", "sync/far", "sync/worst", "sync/tens"),
    )
    kept = lines(path / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(timed + sent)} for line in kept]


def same_end(start: Start, loop: PPOLoop, name: str, whole: dict[tuple, torch.Tensor]) -> None:
    """Bit-equal weights, optimizer states and counters, the same samples, the same numbers at each step."""
    found = state_of(loop)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole), name
    assert metrics(start.run(name)) == metrics(start.run("whole"))
    assert (start.run(name) / "samples.jsonl").read_text() == (start.run("whole") / "samples.jsonl").read_text()
    optimizers = [role.optimizer for role in loop.checkpoints._roles]
    assert [(one.steps_done, one.steps_skipped) for one in optimizers] == [(10, 0), (12, 0)]


def _killed_at_every_step(start: Start, whole: dict) -> None:
    for steps in range(1, 6):
        die_after(start.loop("each", "checkpoint.every_steps=1", "checkpoint.asynchronous=false"), steps)
    last = start.loop("each", "checkpoint.every_steps=1", "checkpoint.keep_last=1")
    assert last.start.step == 5
    last.run()
    same_end(start, last, "each", whole)
    kept = {path.name for path in (start.run("each") / "checkpoints").iterdir()}
    assert kept == {"step_00000006", "latest"}


def _killed_between_saves(start: Start, whole: dict) -> None:
    settings = ("checkpoint.every_steps=2", "checkpoint.save_hf_every=3", f"save_hf={start.folder}/model_out")
    die_after(start.loop("some", *settings), 3)
    assert [line["step"] for line in metrics(start.run("some"))] == [0, 1, 2, 3]
    second = start.loop("some", *settings)
    assert second.start.step == 2
    assert [line["step"] for line in metrics(start.run("some"))] == [0, 1, 2]
    die_after(second, 5)
    last = start.loop("some", *settings)
    assert last.start.step == 4
    last.run()
    same_end(start, last, "some", whole)
    _exports_can_be_loaded(start)


def _exports_can_be_loaded(start: Start) -> None:
    of_steps = start.run("some") / "hf"
    assert sorted(path.name for path in of_steps.iterdir()) == ["step_00000003", "step_00000006"]
    early, late = (load_file(of_steps / f"step_0000000{step}" / "model.safetensors") for step in (3, 6))
    last = load_file(start.folder / "model_out" / "model.safetensors")
    assert all(torch.equal(late[name], last[name]) for name in last)
    assert not all(torch.equal(early[name], last[name]) for name in last)
    model, report = AutoModelForCausalLM.from_pretrained(of_steps / "step_00000003", output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.equal(model.state_dict()["model.norm.weight"], early["model.norm.weight"])


def _stopped_and_gone_on_with(start: Start, whole: dict) -> None:
    first = start.loop("stop")
    stop_after(first, start.run("stop"), 3)
    assert [path.name for path in (start.run("stop") / "checkpoints").glob("step_*")] == ["step_00000003"]
    specs = {role.name: role.model.spec for role in first.checkpoints._roles}
    foretold = sum(one.weights + one.optimizer for one in saved_bytes(model_roles(first.config, specs)))
    there = start.run("stop") / "checkpoints" / "step_00000003"
    assert read_manifest(there).state.num_bytes == foretold
    torch.manual_seed(5)
    second = start.loop("stop")
    assert torch.equal(torch.get_rng_state(), torch.load(there / "rng" / "rank_00000.pt", weights_only=True)["torch"])
    said = start.said()
    assert f"resume: from step 3 of 6, {start.run('stop')}/checkpoints/step_00000003" in said
    saved, loaded = (next(line for line in said.splitlines() if f" {word} " in line) for word in ("saved", "loaded"))
    assert saved.partition("saved")[2].split() == loaded.partition("loaded")[2].split()
    with (
        patch("rlhf.trainers.checkpointing.load"),
        pytest.raises(CheckpointError, match="tensors are not what was saved"),
    ):
        start.loop("stop")
    stop_after(second, start.run("stop"), 3)  # asked for before a step was done: there is nothing new to save
    last = start.loop("stop")
    last.run()
    same_end(start, last, "stop", whole)
    with pytest.raises(CheckpointError, match="6 steps are done and num_steps = 6, so that none is left to train"):
        start.loop("stop")
    more = start.loop("stop", "num_steps=7")
    more.run()
    assert [line["step"] for line in metrics(start.run("stop"))] == list(range(8))


def _a_damaged_checkpoint_is_left_out(start: Start, whole: dict) -> None:
    settings = ("checkpoint.every_steps=2", "checkpoint.keep_every=2")
    die_after(start.loop("bad", *settings), 5)
    target = next((start.run("bad") / "checkpoints" / "step_00000004").glob("*.distcp"))
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)
    last = start.loop("bad", *settings)
    said = start.said()
    assert "step_00000004 is damaged" in said
    assert "resume: from step 2 of 6" in said
    assert "checkpoint of a later step, not whole, is now " in said
    assert len(list((start.run("bad") / "checkpoints").glob("step_00000004.left-*"))) == 1
    last.run()
    same_end(start, last, "bad", whole)
    for path in (start.run("stop") / "checkpoints").glob("step_*/manifest.json"):
        path.unlink()  # none is whole
    with pytest.raises(CheckpointError, match=r"none of step_.* is whole .*checkpoint\.resume=never"):
        start.loop("stop")
    assert not start.run("stop.1").exists()
    assert start.loop("stop", "checkpoint.resume=never").start.step == 0
    assert (start.run("stop.1") / "metrics.jsonl").exists()


def _what_differs_is_said(start: Start) -> None:
    """None of these touches the run that is there."""
    before = metrics(start.run("each"))
    more = "num_steps=9"
    with pytest.raises(CheckpointError, match=r"seed: 2 now, 1 then; .*drawn from it"):
        start.loop("each", more, "seed=2")
    other = start.folder / "other"
    make_files(other, num_layers=2)
    models = [f"{role}.model.path={other}/model" for role in ("actor", "critic", "reference")]
    with pytest.raises(CheckpointError, match=r"actor\.model\.path: another model: num_layers 2 now, 3 then"):
        start.loop("each", more, *models, "actor.freeze=[model.layers.0.mlp.*]")
    rows = start.folder / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("0=", "1="))
    with pytest.raises(CheckpointError, match=r"data\.path: .*rows\.jsonl gives other data: .* bytes"):
        start.loop("each", more)
    rows.write_text(text)
    with pytest.raises(CheckpointError, match="the weights of reference have checksum"):
        start.loop("each", more, "reference.model.init=random")
    assert metrics(start.run("each")) == before
    assert not start.run("each.1").exists()


def _another_run_begins_from_a_checkpoint(start: Start) -> None:
    source = start.run("bad") / "checkpoints" / "step_00000002"
    branch = ("checkpoint.resume=" + str(source), "num_steps=4")
    first = start.loop("branch", *branch)
    assert (first.start.step, first.evaluates_first) == (2, True)
    stop_after(first, start.run("branch"), 3)
    assert [line["step"] for line in metrics(start.run("branch"))] == [2, 3]
    assert {line["step"] for line in lines(start.run("branch") / "samples.jsonl")} == {2, 3}
    second = start.loop("branch", *branch)  # the same command goes on from the run's own
    assert (second.start.step, second.evaluates_first) == (3, False)
    second.run()
    summary = json.loads((start.run("branch") / "summary.json").read_text())
    first_line, third, last = metrics(start.run("branch"))
    assert (first_line["step"], last["step"]) == (2, 4)
    assert summary["held_out_before"] == first_line["held_out/solved"]
    assert summary["held_out_after"] == last["held_out/solved"]
    assert summary["reward_first"] == third["reward/mean"]
    own = start.run("bad") / "checkpoints"
    with pytest.raises(CheckpointError, match="step_00000004 is this run's own, and step_00000006 is newer"):
        start.loop("bad", f"checkpoint.resume={own}/step_00000004", "num_steps=9")
    with pytest.raises(CheckpointError, match=r"nowhere is no whole checkpoint \(.*such as runs/NAME/checkpoints"):
        start.loop("none", f"checkpoint.resume={start.folder}/nowhere")
    anew = start.loop("bad", "checkpoint.resume=never")
    assert (anew.start.step, RunRecord.read(start.run("bad.1") / "checkpoints" / "step_00000006").step) == (0, 6)


def _a_stop_that_cannot_be_saved_fails(start: Start) -> None:
    loop, folder = start.loop("full"), start.run("full") / "checkpoints"
    folder.rmdir()
    folder.write_text("")  # nothing can be made in it
    with pytest.raises(SaveError, match="ends after step 1 and could not be saved there"):
        stop_after(loop, start.run("full"), 1)
    assert "checkpoint of step 1 was not saved: " in start.said()
    assert [line["step"] for line in metrics(start.run("full"))] == [0, 1]


def _a_save_that_fails_in_the_background_costs_a_line(start: Start) -> None:
    loop, folder = start.loop("line", "checkpoint.every_steps=1", "num_steps=3"), start.run("line") / "checkpoints"
    folder.rmdir()
    folder.write_text("")
    ask, done = loop.reporter.stop_agreed, count()

    def stop_agreed() -> bool:
        if next(done) == 2:
            loop.checkpoints._saver.wait()
            folder.unlink()
            folder.mkdir()
        return ask()

    loop.reporter.stop_agreed = stop_agreed
    loop.run()
    said = start.said()
    assert [f"checkpoint of step {step} was not saved: " in said for step in (1, 2, 3)] == [True, True, False]
    assert [path.name for path in folder.glob("step_*")] == ["step_00000003"]


def _a_save_that_failed_is_tried_again_where_the_run_ends(start: Start) -> None:
    loop = start.loop("again", "checkpoint.every_steps=1")
    saver, tries = loop.checkpoints._saver, []
    begin = saver._begin

    def once_full(step: int) -> tuple[Path | None, str | None]:
        tries.append(step)
        return begin(step) if len(tries) > 1 else (None, "no room")

    with patch.object(saver, "_begin", once_full):
        stop_after(loop, start.run("again"), 1)
    assert tries == [1, 1]
    assert RunRecord.read(start.run("again") / "checkpoints" / "step_00000001").step == 1


def _an_export_that_fails_costs_no_save(start: Start) -> None:
    """A rank that raises leaves at once and takes a save in the background with it, so there must be none then."""
    for name, settings in (("last", ()), ("each_step", ("checkpoint.save_hf_every=1", "checkpoint.every_steps=1"))):
        loop = start.loop(f"export_{name}", f"save_hf={start.folder}/never", *settings)
        saver, run_folder = loop.checkpoints._saver, start.run(f"export_{name}")
        write = saver._write

        def slow(*args: Any, write: Callable[..., Path | None] = write) -> Path | None:
            time.sleep(0.2)
            return write(*args)

        def full(*_: Path, checkpoints: Path = run_folder / "checkpoints") -> None:
            raise SaveError(f"no room, with {sorted(path.name for path in checkpoints.glob('step_*'))} saved")

        with (
            patch.object(saver, "_write", slow),
            patch.object(loop.checkpoints, "_export", full),
            pytest.raises(SaveError, match=r"with \['step_00000001'\] saved"),
        ):
            stop_after(replace(loop, save=full), run_folder, 1)
        said = start.said()
        assert ("step 1: no room, with ['step_00000001'] saved; the run goes on" in said) == (name == "each_step")


def _sft_goes_on_too(start: Start) -> None:
    whole = start.sft("sft_whole")
    whole.run()
    first = start.sft("sft", "checkpoint.every_steps=2", "num_steps=2", "checkpoint.save_hf_every=2")
    first.run()
    last = start.sft("sft", "checkpoint.every_steps=2", "checkpoint.save_hf_every=2")
    assert last.start.step == 2
    last.run()
    mine, other = (loop.checkpoints._roles[0].blocks(own_share=True) for loop in (last, whole))
    assert all(torch.equal(a.data, b.data) for a, b in zip(mine, other, strict=True))
    assert metrics(start.run("sft")) == metrics(start.run("sft_whole"))
    folders = sorted(path.name for path in (start.run("sft") / "hf").iterdir())
    assert folders == ["final", "step_00000002", "step_00000004"]


def _all_checks(folder: Path) -> None:
    torch.set_num_threads(1)
    start = Start(folder, GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60)), io.StringIO())
    with redirect_stdout(start.console), patch("rlhf.metrics.curves.draw_curves"):  # a picture takes a second
        loop = start.loop("whole")
        loop.run()
        assert not list((start.run("whole") / "checkpoints").glob("step_*"))  # nothing asked for any
        whole = state_of(loop)
        _killed_at_every_step(start, whole)
        _killed_between_saves(start, whole)
        _stopped_and_gone_on_with(start, whole)
        _a_damaged_checkpoint_is_left_out(start, whole)
        _what_differs_is_said(start)
        _another_run_begins_from_a_checkpoint(start)
        _a_stop_that_cannot_be_saved_fails(start)
        _a_save_that_fails_in_the_background_costs_a_line(start)
        _a_save_that_failed_is_tried_again_where_the_run_ends(start)
        _an_export_that_fails_costs_no_save(start)
        _sft_goes_on_too(start)


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_that_is_killed_and_started_again_ends_as_one_that_never_was(tmp_path: Path) -> None:
    make_files(tmp_path)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()[:ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    paths = {"model": tmp_path / "model", "rows": tmp_path / "rows.jsonl", "folder": tmp_path}
    (tmp_path / "sft.yaml").write_text(SFT.format(**paths))
    run_ranks(1, _all_checks, tmp_path)
