"""One run of continuous batching: rows enter, get a token at each step, and leave."""

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.config.rollout import SamplingConfig
from rlhf.rollout.native.kv_cache import KvCache
from rlhf.rollout.native.linear import ROW_STEP
from rlhf.rollout.native.memory import SPAN_STEP
from rlhf.rollout.native.model import DecodeStep, NativeModel, PromptPack
from rlhf.rollout.native.peers import Peers
from rlhf.rollout.native.responses import Responses
from rlhf.rollout.native.rope import rotary_table
from rlhf.rollout.native.running import Column, RunningRows
from rlhf.rollout.native.sampler import sample
from rlhf.rollout.native.scheduler import Admission, Row, Scheduler
from rlhf.rollout.native.tails import Tails
from rlhf.rollout.seeds import uniforms
from rlhf.rollout.stopping import Decode, StopStrings

PREFILL_TOKENS = 4096
"""Most prompt tokens in one prefill; enough for full speed, little enough for the activations of large models."""

PROMPT_STEP = 64
"""Padded prompts are multiples of this, also for the last bits: SDPA's blocks of query rows are never short then."""


class Decoder:
    """One run: these rows, this sampling. All ranks of an engine make and run it alike."""

    def __init__(
        self,
        model: NativeModel,
        cache: KvCache,
        peers: Peers,
        *,
        sampling: SamplingConfig,
        stop_ids: Tensor,
        decode: Decode | None,
    ) -> None:
        self._model, self._cache, self._peers = model, cache, peers
        self._sampling, self._stop_ids = sampling, stop_ids
        self._tails = None if decode is None or not sampling.stop else Tails(StopStrings(sampling.stop, decode))
        self._num_steps = 0
        self._longest = 0  # tokens of the longest running row, less the steps made so far

    @torch.inference_mode()
    def run(self, rows: list[Row], responses: Responses, *, max_running: int) -> None:
        """Sample a response to each row. Collective over the engine."""
        num_slots = self._cut_cache(rows, max_running)
        scheduler = Scheduler(rows, num_slots=num_slots)
        running = RunningRows(_multiple(num_slots, ROW_STEP), self._model.device)
        rotary = rotary_table(
            self._model.spec, self._cache.slot_tokens, device=self._model.device, dtype=self._model.dtype
        )
        while not scheduler.is_done:
            self._let_in(scheduler, running, rotary)
            num_rows = scheduler.num_running
            tokens, logprobs = self._step(num_rows, _multiple(num_rows, ROW_STEP), running, rotary)
            responses.add(running.get(Column.INDEX, num_rows).clone(), tokens, logprobs)
            running.advance(tokens)
            self._let_out(scheduler, running, tokens, responses)
            responses.report()

    def _cut_cache(self, rows: list[Row], max_running: int) -> int:
        """Slots as long as the longest row may get; as many of them as fit. Returns how many."""
        longest = max(len(row.prompt) for row in rows) + self._sampling.max_new_tokens - 1
        slot_tokens = _multiple(longest, SPAN_STEP)
        num_slots = min(len(rows), max_running, self._cache.tokens // slot_tokens)
        self._cache.cut(num_slots=num_slots, slot_tokens=slot_tokens)
        return num_slots

    def _let_in(self, scheduler: Scheduler, running: RunningRows, rotary: Tensor) -> None:
        """Fill open slots with waiting rows, close the gaps that remain."""
        admitted = scheduler.admit()
        if admitted.rows:
            for row in admitted.rows:
                row.entered = self._num_steps
            running.enter(admitted.rows, admitted.slots)
            self._prefill(admitted, rotary)
        self._longest = max((len(row.prompt) - row.entered for row in scheduler.running()), default=0)
        if moves := scheduler.close_gaps():
            source, target = [list(slots) for slots in zip(*moves, strict=True)]
            self._cache.copy(source, target, self._span())
            running.move(source, target)

    def _prefill(self, admitted: Admission, rotary: Tensor) -> None:
        """Put all but the last token of new prompts into the cache; the last one is the first step's input."""
        if admitted.copied:
            source, target = [list(slots) for slots in zip(*admitted.copied, strict=True)]
            self._cache.copy(source, target, max(len(row.prompt) for row in admitted.rows))
        order = sorted(range(len(admitted.prompts)), key=lambda i: len(admitted.prompts[i]))
        slots: dict[int, list[int]] = {i: [] for i in order}
        for index, slot in admitted.computed:
            slots[index].append(slot)
        for indices in _chunks([i for i in order if len(admitted.prompts[i]) > 1], admitted.prompts):
            prompts = [admitted.prompts[i][:-1] for i in indices]
            self._model.prefill(self._pack(prompts, [slots[i] for i in indices], rotary), self._cache)

    def _pack(self, prompts: list[tuple[int, ...]], slots: list[list[int]], rotary: Tensor) -> PromptPack:
        device, lengths = self._model.device, torch.tensor([len(p) for p in prompts])
        num_tokens, longest = int(lengths.sum()), _multiple(int(lengths.max()), PROMPT_STEP)
        prompt_of = torch.repeat_interleave(torch.arange(len(prompts)), lengths)
        positions = torch.arange(num_tokens) - (lengths.cumsum(0) - lengths)[prompt_of]
        padding = (0, _multiple(num_tokens, ROW_STEP) - num_tokens)
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        return PromptPack(
            tokens=functional.pad(tokens, padding).to(device),
            rotary=rotary[functional.pad(positions, padding).to(device)],
            padded_index=functional.pad(prompt_of * longest + positions, padding).to(device),
            num_tokens=num_tokens,
            num_prompts=len(prompts),
            longest=longest,
            source=torch.repeat_interleave(torch.tensor([len(s) for s in slots])).to(device),
            slots=torch.tensor([slot for of_prompt in slots for slot in of_prompt], device=device),
        )

    def _step(self, num_rows: int, padded: int, running: RunningRows, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each running row and its log-prob (0 on ranks that do not lead)."""
        positions = running.get(Column.POSITION, num_rows)
        span = self._span()
        self._num_steps += 1
        seen = torch.arange(span, device=positions.device) <= positions.unsqueeze(1)
        step = DecodeStep(
            tokens=running.get(Column.TOKEN, padded),
            rotary=rotary[positions],
            kv_index=self._cache.token_index(positions),
            mask=torch.zeros_like(seen, dtype=self._model.dtype).masked_fill_(~seen, float("-inf"))[:, None, None],
            num_rows=num_rows,
        )
        logits = self._peers.gather_logits(self._model.decode(step, self._cache))
        if logits is None:
            tokens, logprobs = positions.new_empty(padded), torch.zeros(padded, device=positions.device)
        else:
            numbers = uniforms(running.get(Column.SEED, padded), running.get(Column.NUM_SAMPLED, padded))
            tokens, logprobs = sample(logits, self._model.spec.vocab_size, numbers, self._sampling)
        return self._peers.share_tokens(tokens)[:num_rows], logprobs[:num_rows]

    def _span(self) -> int:
        """Tokens that attention must look at: the longest running row's, rounded up."""
        return _multiple(self._longest + self._num_steps, SPAN_STEP)

    def _let_out(self, scheduler: Scheduler, running: RunningRows, tokens: Tensor, responses: Responses) -> None:
        """Take out rows that sampled a stop token, completed a stop string, or have all their tokens."""
        stopped = (tokens == self._stop_ids.unsqueeze(1)).any(0) | self._ended_by_strings(running, tokens)
        ended = stopped | (running.get(Column.NUM_SAMPLED, tokens.numel()) >= self._sampling.max_new_tokens)
        slots = ended.nonzero().flatten().tolist()
        if slots:
            rows = scheduler.finish(slots)
            responses.finish([row.index for row in rows], stopped[slots].tolist())
            if self._tails is not None:
                self._tails.forget([row.index for row in rows])

    def _ended_by_strings(self, running: RunningRows, tokens: Tensor) -> Tensor:
        """Which rows these tokens end, bool [rows]; the leader looks at their text. Collective over the engine."""
        ended = torch.zeros_like(tokens)
        if not self._sampling.stop:
            return ended.bool()
        if self._peers.is_leader:
            assert self._tails is not None, "refused at submission"
            rows = running.get(Column.INDEX, tokens.numel()).tolist()
            ended = torch.tensor(self._tails.ended(rows, tokens.tolist())).to(tokens)
        return self._peers.share_tokens(ended).bool()


def _multiple(count: int, of: int) -> int:
    return ceil(count / of) * of


def _chunks(indices: list[int], prompts: list[tuple[int, ...]]) -> Iterator[list[int]]:
    """Consecutive indices whose prompts have at most PREFILL_TOKENS tokens together; a longer prompt goes alone."""
    chunk: list[int] = []
    total = 0
    for index in indices:
        if chunk and total + len(prompts[index]) > PREFILL_TOKENS:
            yield chunk
            chunk, total = [], 0
        chunk.append(index)
        total += len(prompts[index])
    if chunk:
        yield chunk
