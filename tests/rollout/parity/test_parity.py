"""What every engine must do alike, against transformers and the definitions: each test runs on each engine.

One engine a family and kind: SGLang takes a quarter of a minute to start.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from rlhf.build.generation import Answer, GenerationEngine, SamplingConfig, open_engine
from rlhf.data.batch import FinishReason, PromptBatch, Rollout
from rlhf.data.ragged import Ragged
from rlhf.data.record import PromptRecord
from rlhf.errors import DataError, EngineError
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.feed import FixedRows, Load, Verdict, Work
from tests.rollout.feeds import assert_same
from tests.rollout.parity.models import COMMON, FAMILIES, REAL, Checkpoint, checkpoint
from tests.rollout.parity.references import chi_square, distribution, greedy, logprobs, shortfalls
from tests.rollout.sglang.tiny import needs_sglang

CLOSE = {"atol": 5e-5, "rtol": 0}
"""Of log-probs: fp32 sums in another order, through 30 layers where the model is real."""
NEAR = 2e-4
"""Two logits so close may change places by rounding."""
LENGTHS = (9, 1, 23, 4, 70, 2)
ROOM = 2048
"""Tokens of keys and values."""


@dataclass(frozen=True)
class Side:
    """An engine with a checkpoint's weights."""

    kind: str
    checkpoint: Checkpoint
    engine: GenerationEngine

    @property
    def rollouts(self) -> RolloutEngine:
        """The engine as the trainer sees it."""
        return self.engine._engine._running[0]

    def greedy(self, prompts: list[list[int]], count: int, **changes: object) -> list[Answer]:
        """The most likely responses."""
        return self.engine.generate(prompts, SamplingConfig(temperature=0.0, max_new_tokens=count, **changes))


@pytest.fixture(scope="module")
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    kind, family = request.param
    torch.set_num_threads(1)
    made = checkpoint(family, tmp_path_factory.mktemp(family))
    with open_engine(
        made.folder, engine=kind, seed=5, kv_cache_tokens=ROOM, log_folder=tmp_path_factory.mktemp("logs")
    ) as engine:
        yield Side(kind, made, engine)


def sides(*families: str) -> pytest.MarkDecorator:
    """Every engine with each of these families' checkpoints."""
    pairs = []
    for family in families:
        pairs.append(pytest.param(("native", family), id=f"{family}-native"))
        pairs.append(pytest.param(("sglang", family), id=f"{family}-sglang", marks=needs_sglang))
    return pytest.mark.parametrize("side", pairs, indirect=True)


def prompts_of(made: Checkpoint) -> list[list[int]]:
    """Random tokens; texts for the real model, which is sure of its answers only there."""
    if made.family == REAL:
        texts = ("The capital of France is", "1, 2, 3, 4,", "Water boils at", "def add(a, b):\n")
        return [made.tokenizer(text).input_ids for text in texts]
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, made.model.config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def batch_of(prompts: list[list[int]], samples: int = 1, *, first: int = 0) -> PromptBatch:
    """So many rows of each prompt, with ids from `first` on."""
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts for _ in range(samples)]
    return PromptBatch(
        sample_ids=torch.arange(first, first + len(rows)),
        prompt_ids=torch.arange(len(prompts)).repeat_interleave(samples),
        tokens=Ragged.of(rows, dtype=torch.int64),
        records=(PromptRecord("", "", {}),) * len(rows),
    )


def strings_in(made: Checkpoint, responses: list[list[int]]) -> list[str]:
    """Strings that responses hold behind their second token, of one token and then of two."""
    text_of = made.tokenizer.decode
    said = [text_of(row[at : at + count]) for count in (1, 2) for row in responses for at in range(2, len(row) - 1)]
    return list(dict.fromkeys(text for text in said if text.isascii()))[::5]


def begun_of(whole: Rollout, kept: torch.Tensor) -> Rollout:
    """The first `kept` [rows] tokens of each response, as an abort leaves them."""
    within = torch.cat([torch.arange(count) < keep for count, keep in zip(whole.responses.lengths, kept, strict=True)])
    names = ("responses", "rollout_logprobs", "provenance", "policy_versions")
    cut = {name: Ragged(getattr(whole, name).values[within], kept) for name in names}
    return replace(whole, finish_reasons=torch.full_like(whole.finish_reasons, FinishReason.ABORT), **cut)


def cut_at(tokens: list[int], ends: list[int]) -> list[int]:
    """A response up to and with the first token that ends it."""
    found = [at for at, token in enumerate(tokens) if token in ends]
    return tokens[: found[0] + 1] if found else tokens


@sides(*FAMILIES)
def test_greedy_tokens_and_logprobs_equal_transformers(side: Side) -> None:
    made, prompts = side.checkpoint, prompts_of(side.checkpoint)
    for prompt, answer in zip(prompts, side.greedy(prompts, 13), strict=True):
        wanted = cut_at(greedy(made.model, prompt, 13), [made.eos])
        assert list(answer.tokens) == wanted
        assert answer.finish_reason == ("stop" if wanted[-1] == made.eos else "length")
        torch.testing.assert_close(torch.tensor(answer.logprobs), logprobs(made.model, prompt, answer.tokens), **CLOSE)


@sides(*FAMILIES)
def test_logprobs_of_samples_are_those_of_the_tempered_distribution_before_any_cut(side: Side) -> None:
    made, prompts = side.checkpoint, prompts_of(side.checkpoint)
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=40, min_p=0.02, max_new_tokens=9)
    answers = side.engine.generate(prompts, sampling, n=2)
    for at, answer in enumerate(answers):
        wanted = logprobs(made.model, prompts[at // 2], answer.tokens, 0.7)
        torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, **CLOSE)
    assert len({answer.tokens for answer in answers}) > len(prompts)


CUTS = {
    "whole": {},
    "hot": {"temperature": 1.6},
    "top-k": {"top_k": 11},
    "top-p": {"temperature": 1.2, "top_p": 0.7},
    "min-p": {"temperature": 1.3, "min_p": 0.08},
    "all": {"temperature": 1.5, "top_k": 40, "top_p": 0.85, "min_p": 0.05},
}
DRAWS = 2500


@pytest.mark.parametrize("cut", CUTS)
@sides("llama")
def test_drawn_tokens_pass_a_chi_square_test_against_the_exact_distribution(side: Side, cut: str) -> None:
    model, prompt = side.checkpoint.model, prompts_of(side.checkpoint)[0]
    sampling = SamplingConfig(max_new_tokens=1, **CUTS[cut])
    answers = side.engine.generate([prompt], sampling, n=DRAWS)
    tokens = torch.tensor([answer.tokens[0] for answer in answers])
    found, freedom = chi_square(tokens, distribution(model, prompt, sampling))
    limit = freedom + 5 * (2 * freedom) ** 0.5  # of right samplers about one in 100,000 is above
    assert found < limit
    for other in CUTS.values():
        if other != CUTS[cut]:  # and the draws are many enough to tell the settings apart
            assert chi_square(tokens, distribution(model, prompt, SamplingConfig(**other)))[0] > limit


@sides("llama")
def test_each_row_is_drawn_by_its_own_settings(side: Side) -> None:
    """Several submissions, one answer."""
    made, engine = side.checkpoint, side.rollouts
    prompt = prompts_of(made)[2]
    settings = [SamplingConfig(max_new_tokens=1, **cut) for cut in CUTS.values()]
    settings.append(SamplingConfig(max_new_tokens=1, temperature=0.0))
    for at, sampling in enumerate(settings):
        engine.submit(batch_of([prompt], 300, first=300 * at), sampling)
    tokens = engine.collect().responses.values.split(300)
    for sampling, drawn in zip(settings, tokens, strict=True):
        if not sampling.temperature:
            assert drawn.tolist() == greedy(made.model, prompt, 1) * 300
            continue
        found, freedom = chi_square(drawn, distribution(made.model, prompt, sampling))
        assert found < freedom + 5 * (2 * freedom) ** 0.5


@sides("llama", "qwen3_moe")
def test_samples_are_a_function_of_their_seeds_whatever_the_engine(side: Side) -> None:
    prompts = prompts_of(side.checkpoint)
    sampling = SamplingConfig(temperature=1.1, top_p=0.95, max_new_tokens=12)
    batch = batch_of(prompts, 3)
    found = side.rollouts.generate(batch, sampling)
    with open_engine(side.checkpoint.folder, seed=5, kv_cache_tokens=ROOM, max_running=3) as other:
        wanted = other._engine.generate(batch, sampling)
    assert [row.tolist() for row in found.responses.rows()] == [row.tolist() for row in wanted.responses.rows()]
    torch.testing.assert_close(found.rollout_logprobs.values, wanted.rollout_logprobs.values, **CLOSE)
    again = side.rollouts.generate(batch.select(torch.tensor([4])), sampling)
    assert again.responses.values.tolist() == wanted.responses.rows()[4].tolist()


@sides("llama")
def test_cuts_change_nothing_at_temperature_zero(side: Side) -> None:
    prompts = prompts_of(side.checkpoint)
    plain, cut = side.greedy(prompts, 7), side.greedy(prompts, 7, top_k=3, top_p=0.4, min_p=0.3)
    assert [answer.tokens for answer in cut] == [answer.tokens for answer in plain]
    for one, other in zip(cut, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), **CLOSE)


@sides("llama")
def test_the_stop_tokens_that_were_asked_for_end_a_response_and_belong_to_it(side: Side) -> None:
    made, prompts = side.checkpoint, prompts_of(side.checkpoint)
    free = [greedy(made.model, prompt, 13) for prompt in prompts]
    stop = (free[0][4], free[2][9])
    answers = side.greedy(prompts, 13, stop_token_ids=stop)
    for row, answer in zip(free, answers, strict=True):
        wanted = cut_at(row, [made.eos, *stop])
        assert (list(answer.tokens), answer.finish_reason) == (wanted, "stop" if len(wanted) < 13 else "length")
    ignoring = side.greedy(prompts, 13, ignore_eos=True)
    assert [list(answer.tokens) for answer in ignoring] == free


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@sides("llama")
def test_a_response_ends_with_the_token_that_completes_a_string(side: Side, temperature: float) -> None:
    text_of = side.checkpoint.tokenizer.decode
    batch = batch_of(prompts_of(side.checkpoint), 4)
    free = SamplingConfig(temperature=temperature, max_new_tokens=24)
    whole = [row.tolist() for row in side.rollouts.generate(batch, free).responses.rows()]
    stop = (*strings_in(side.checkpoint, whole)[:4], "is in no response")
    asked = SamplingConfig(temperature=temperature, max_new_tokens=24, stop=stop)
    rollout = side.rollouts.generate(batch, asked)
    for row, found in zip(whole, rollout.responses.rows(), strict=True):
        ends = [n for n in range(1, len(row) + 1) if any(one in text_of(row[:n]) for one in stop)]
        assert found.tolist() == row[: min(ends, default=len(row))]
    assert rollout.responses.lengths.unique().numel() > 1


@sides("llama")
def test_a_response_that_was_begun_goes_on_as_if_it_had_never_been_cut(side: Side) -> None:
    batch = batch_of(prompts_of(side.checkpoint), 4)
    free = SamplingConfig(temperature=1.2, top_p=0.97, max_new_tokens=24)
    said = [row.tolist() for row in side.rollouts.generate(batch, free).responses.rows()]
    sampling = replace(free, stop=tuple(strings_in(side.checkpoint, said)[-3:]))  # of two tokens each
    whole = side.rollouts.generate(batch, sampling)
    assert whole.finish_reasons.unique().numel() == 2
    lengths = whole.responses.lengths
    kept = torch.where(torch.arange(len(lengths)) % 2 == 0, lengths - 1, lengths // 2)  # a cut inside of strings too
    feed = FixedRows([Work(batch, begun=begun_of(whole, kept))])
    side.rollouts.run(feed, sampling)
    assert_same(feed.ordered(), whole, atol=CLOSE["atol"])


@sides("llama")
def test_responses_have_no_more_tokens_than_were_asked_for(side: Side) -> None:
    prompts = prompts_of(side.checkpoint)
    longest = side.greedy(prompts, 20, ignore_eos=True)
    for count in (1, 2, 13):
        answers = side.greedy(prompts, count, ignore_eos=True)
        assert [answer.tokens for answer in answers] == [answer.tokens[:count] for answer in longest]
        assert {answer.finish_reason for answer in answers} == {"length"}


@sides("llama")
def test_an_empty_prompt_is_refused_and_the_longest_is_answered(side: Side) -> None:
    with pytest.raises(DataError, match="prompt 1 is empty"):
        side.greedy([[5], []], 3)
    with pytest.raises(EngineError, match="has an empty prompt"):
        side.rollouts.submit(batch_of([[5], []]), SamplingConfig(max_new_tokens=3))
    made, most = side.checkpoint, COMMON["max_position_embeddings"]
    prompt = [7 * at % 300 for at in range(most - 9)]
    with pytest.raises(DataError, match=f"needs at most {most}"):
        side.greedy([[1, *prompt]], 9)
    (answer,) = side.greedy([prompt], 9, ignore_eos=True)
    assert list(answer.tokens) == greedy(made.model, prompt, 9)


@sides("llama")
def test_the_most_likely_token_at_a_temperature_has_the_logprob_of_that_temperature(side: Side) -> None:
    """A top_k of 1 is not a temperature of 0; and any number may be a top_k."""
    made, prompts = side.checkpoint, prompts_of(side.checkpoint)
    plain = side.greedy(prompts, 5)
    for cut in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        answers = side.engine.generate(prompts, SamplingConfig(temperature=0.5, max_new_tokens=5, **cut))
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        for prompt, answer in zip(prompts, answers, strict=True):
            wanted = logprobs(made.model, prompt, answer.tokens, 0.5)
            torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, **CLOSE)
    assert side.engine.generate(prompts[:1], SamplingConfig(top_k=2**40, max_new_tokens=1))


class UntilSomeHaveEnded:
    """A feed of one work that stops the run when so many rows have ended."""

    def __init__(self, work: Work, wanted: int) -> None:
        self._waiting, self._wanted = [work], wanted
        self.parts: list[Rollout] = []

    def take(self, load: Load) -> Work | None:
        return self._waiting.pop() if self._waiting else None

    def done(self, finished: Rollout) -> None:
        self.parts.append(finished)

    def verdict(self) -> Verdict:
        ended = sum(int((part.finish_reasons != FinishReason.ABORT).sum()) for part in self.parts)
        return Verdict.ABORT if ended >= self._wanted else Verdict.GO_ON


@sides("llama")
def test_a_response_that_is_stopped_at_its_end_is_none_to_be_continued(side: Side) -> None:
    """A fifth of all tokens ends a response, so rows end in whatever step they are stopped."""
    ends, stopped = tuple(range(60)), 0
    sampling = SamplingConfig(temperature=2.0, max_new_tokens=60, stop_token_ids=ends)
    for _ in range(4):
        feed = UntilSomeHaveEnded(Work(batch_of(prompts_of(side.checkpoint), 30)), 20)
        side.rollouts.run(feed, sampling)
        for part in feed.parts:
            for reason, row in zip(part.finish_reasons.tolist(), part.responses.rows(), strict=True):
                begun = reason == FinishReason.ABORT and row.numel() > 0
                stopped += begun
                assert not (begun and int(row[-1]) in ends)
    assert stopped > 20


REQUESTS, COUNTS = 1000, (1, 3, 7, 12, 18)


@sides("llama")
def test_a_thousand_requests_of_mixed_lengths_are_all_answered_and_none_mixed_up(side: Side) -> None:
    engine, model = side.rollouts, side.checkpoint.model
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(1, 60, (REQUESTS,), generator=generator).tolist()
    prompts = [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]
    prompts[500:520] = [[*prompt[:-1], at] for at, prompt in enumerate(prompts[480:500])]  # cached but for the end
    most = COMMON["max_position_embeddings"]
    for at in (0, REQUESTS - 11, REQUESTS - 6, REQUESTS - 1):  # as long as may be, with the response that is asked for
        longest = most - COUNTS[at % len(COUNTS)]
        prompts[at] = torch.randint(0, 300, (longest,), generator=generator).tolist()
    for at, count in enumerate(COUNTS):
        sampling = SamplingConfig(temperature=0.0, max_new_tokens=count, ignore_eos=True)
        engine.submit(batch_of(prompts[at :: len(COUNTS)], first=at * REQUESTS), sampling)
        with pytest.raises(EngineError, match="has an empty prompt"):  # which takes none of the others along
            engine.submit(batch_of([*prompts[:3], []], first=7 * REQUESTS), sampling)
    rollout = engine.collect()
    asked = [(prompt, count) for at, count in enumerate(COUNTS) for prompt in prompts[at :: len(COUNTS)]]
    assert [row.tolist() for row in rollout.prompts.tokens.rows()] == [prompt for prompt, _ in asked]
    ids = [at * REQUESTS + row for at in range(len(COUNTS)) for row in range(REQUESTS // len(COUNTS))]
    assert rollout.prompts.sample_ids.tolist() == ids
    assert rollout.responses.lengths.tolist() == [count for _, count in asked]
    responses = [row.tolist() for row in rollout.responses.rows()]
    said = [(prompt, response) for (prompt, _), response in zip(asked, responses, strict=True)]
    for rows in (said[1:-3], [said[0], *said[-3:]]):  # the longest apart, which the others would be padded to
        assert float(shortfalls(model, *map(list, zip(*rows, strict=True))).max()) < NEAR
    swapped = [responses[2], responses[1]]  # and an answer to another prompt would show
    assert float(shortfalls(model, [prompt for prompt, _ in asked[1:3]], swapped).max()) > 100 * NEAR
