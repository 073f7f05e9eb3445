"""The plan of a step for given lengths is the one that ranks come to in a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.config.load import load_config
from rlhf.data.microbatch import plan_microbatches
from rlhf.errors import ConfigError
from rlhf.families.spec import Head
from rlhf.models.calls import Deal
from rlhf.preflight.lengths import Lengths, guess_lengths, read_lengths
from rlhf.preflight.microbatches import plan_work, work_notes
from rlhf.preflight.roles import ModelRole
from tests.mcore.stand_in import tiny_spec

PPO = """
name: one
trainer: ppo
actor: {model: {path: a}, parallel: {dp: 3, pp: 4}, microbatch_tokens: 60}
critic: {model: {path: a}, parallel: {dp: 2}, microbatch_tokens: 50}
reference: {model: {path: a}, parallel: {dp: 40}, microbatch_tokens: 70}
data: {source: jsonl, path: rows.jsonl, max_prompt_tokens: 31}
reward: {function: "mine:score"}
ppo: {prompts_per_step: 12, samples_per_prompt: 3, minibatch_samples: 12}
rollout: {sampling: {max_new_tokens: 100}}
"""


@pytest.fixture
def config(tmp_path: Path):
    (tmp_path / "c.yaml").write_text(PPO)
    return load_config([str(tmp_path / "c.yaml")])


def roles(config) -> list[ModelRole]:
    spec = tiny_spec()
    return [
        ModelRole("actor", config.actor, spec, Head.LM),
        ModelRole("critic", config.critic, spec, Head.VALUE),
        ModelRole("reference", config.reference, spec, Head.LM),
    ]


def test_each_pass_is_cut_as_the_ranks_cut_it(config) -> None:
    lengths = read_lengths("7:1,30:2,55:1")
    works = {work.name: work for work in plan_work(config, roles(config), lengths)}
    assert list(works) == ["actor scores", "critic scores", "reference scores", "actor update", "critic update"]
    rows = lengths.draw(36, seed=config.seed)
    assert sorted(rows) == [7] * 9 + [30] * 18 + [55] * 9
    for role in roles(config):
        deal = Deal(tuple(range(36)), role.grid)
        dealt = [[rows[j] for j in deal.positions(rank)] for rank in range(role.grid.size("dp"))]
        plans = [plan_microbatches(part, role.config.microbatch_tokens, None) for part in dealt]
        count = max(map(len, plans))  # as the ranks agree
        work = works[f"{role.name} scores"]
        assert work.microbatches == (count, count)
        assert work.rows_of_rank == (min(map(len, dealt)), max(map(len, dealt)))
        assert work.fill == pytest.approx(sum(rows) / (count * len(dealt) * role.config.microbatch_tokens))
    assert works["actor update"].optimizer_steps == 3
    assert works["actor update"].rows_of_rank == (4, 4)
    assert works["critic update"].rows_of_rank == (6, 6)
    low, high = works["actor update"].microbatches
    assert 3 / (high + 3) <= works["actor update"].bubble <= 3 / (low + 3)
    assert works["critic update"].bubble == 0
    notes = work_notes(list(works.values()))
    assert notes[0].startswith("reference scores: some dp ranks get no row")
    assert "actor update" in notes[1]


def test_chunks_take_microbatches_pp_at_a_time_and_shorten_the_idle_time(config) -> None:
    lengths, actor = read_lengths("7:1,30:2,55:1"), roles(config)[0]
    works = {}
    for vpp in (1, 3):
        parallel = replace(actor.config.parallel, vpp=vpp)
        role = replace(actor, config=replace(actor.config, parallel=parallel), spec=tiny_spec(num_layers=12))
        works[vpp] = plan_work(config, [role], lengths)[0]
    (plain, _), (chunked, most) = works[1].microbatches, works[3].microbatches
    assert plain % 4, "as many with chunks as without would prove nothing"
    assert chunked == most == plain + -plain % 4
    assert works[3].bubble == pytest.approx(3 / (3 * chunked + 3))
    assert works[3].fill == pytest.approx(works[1].fill * plain / chunked)


def test_rows_longer_than_the_budget_fill_more_than_a_microbatch(config) -> None:
    work = plan_work(config, roles(config)[1:2], read_lengths("100:1"))[0]
    assert work.microbatches == (18, 18)
    assert work.fill == pytest.approx(2.0)


def test_a_histogram_is_drawn_to_one_of_its_weights() -> None:
    lengths = Lengths((5, 9, 11), (1.0, 1.0, 1.0), "")
    drawn = lengths.draw(100, seed=3)
    assert sorted(drawn.count(n) for n in (5, 9, 11)) == [33, 33, 34]
    assert drawn == lengths.draw(100, seed=3) != lengths.draw(100, seed=4)
    assert Lengths((5, 9), (0.0, 1.0), "").draw(3, seed=1) == (9, 9, 9)
    assert len(lengths.draw(1, seed=1)) == 1


def test_the_guess_is_said_and_stays_below_the_longest(config) -> None:
    guess = guess_lengths(config)
    assert guess.source.startswith("guessed: prompts of 15 tokens (half of data.max_prompt_tokens), responses spread")
    assert max(guess.tokens) == 15 + 100
    assert 60 <= sum(guess.tokens) / len(guess.tokens) <= 70


def test_lengths_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("12\n34\n\n12\n")
    assert read_lengths(str(tmp_path / "n")).tokens == (12, 34, 12)
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"prompt_tokens": 3, "response_tokens": 4}\n{"prompt_tokens": 5, "response_tokens": 6}\n')
    assert read_lengths(str(samples)).tokens == (7, 11)
    assert read_lengths("256:40,1024:2.5").weights == (40.0, 2.5)


@pytest.mark.parametrize("given", ["12", "a:b", "0:1", "5:-1", "5:0", "5:1,", "5:1:2", "5:inf", "no/such/file"])
def test_other_forms_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^--lengths: "):
        read_lengths(given)


@pytest.mark.parametrize(("name", "text"), [("n", "1 x"), ("n", ""), ("n", "1"), ("s.jsonl", "{}"), ("s.jsonl", "3")])
def test_files_without_lengths_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"^--lengths: "):
        read_lengths(str(tmp_path / name))
