"""One run of continuous batching: rows enter, get a token at each step, and leave."""

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason
from rlhf.rollout.feed import Verdict
from rlhf.rollout.native.intake import EndedRow, Intake
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
from rlhf.rollout.native.slots import Cut, SlotPlan
from rlhf.rollout.native.tails import Tails
from rlhf.rollout.seeds import uniforms
from rlhf.rollout.stopping import Decode, StopStrings

PREFILL_TOKENS = 4096
"""Most prompt tokens in one prefill; enough for full speed, little enough for the activations of large models."""

PROMPT_STEP = 64
"""Padded prompts are multiples of this, also for the last bits: SDPA's blocks of query rows are never short then."""

REPLAY_TOKENS = 256
"""Most tokens of a response that was begun in one replay: each reads the row's keys and values as in a step."""


class Decoder:
    """One run under one sampling. All ranks of an engine make and run it alike."""

    def __init__(
        self,
        model: NativeModel,
        cache: KvCache,
        peers: Peers,
        *,
        sampling: SamplingConfig,
        stop_ids: Tensor,
        decode: Decode | None,
        max_running: int,
    ) -> None:
        self._model, self._cache, self._peers = model, cache, peers
        self._sampling, self._stop_ids, self._max_running = sampling, stop_ids, max_running
        self._tails = None if decode is None or not sampling.stop else Tails(StopStrings(sampling.stop, decode))
        self._scheduler = Scheduler(num_slots=0)
        self._plan = SlotPlan(
            self._scheduler,
            max_running=max_running,
            cache_tokens=cache.tokens,
            max_new_tokens=sampling.max_new_tokens,
        )
        self._running = RunningRows(_multiple(max_running, ROW_STEP), model.device)
        self._responses = Responses(0, sampling.max_new_tokens, model.device)
        self._rotary = torch.empty(0)
        self._num_steps = 0
        self._longest = 0  # tokens of the longest running row, less the steps made so far

    @torch.inference_mode()
    def run(self, intake: Intake) -> None:
        """Sample a response to each row that comes in, until its feed says otherwise. Collective over the engine."""
        scheduler, ended = self._scheduler, list[EndedRow]()
        while True:
            room = self._plan.room if scheduler.num_running else self._max_running
            orders = intake.next(
                ended,
                room=room - scheduler.num_waiting,
                new_tokens=sum(self._num_steps - row.entered for row in scheduler.running()),
                is_idle=scheduler.is_done,
            )
            ended = []
            if orders.verdict == Verdict.ABORT:
                running = [slot for slot, _ in scheduler.occupied()]
                intake.abort(self._leave(running, [FinishReason.ABORT] * len(running)))
                return
            self._plan.add(orders.rows)
            if not scheduler.is_done:
                new = [row.index for row in self._let_in(intake)]
                ended = self._step()
                intake.have_first_token(new)
            elif orders.verdict == Verdict.END:
                return

    def _let_in(self, intake: Intake) -> list[Row]:
        """Fill open slots with waiting rows, which it gives, and close the gaps that remain."""
        if (cut := self._plan.next_cut()) is not None:
            self._cut_cache(cut)
        admitted = self._scheduler.admit()
        if admitted.rows:
            intake.began([row.index for row in admitted.rows])
            for row in admitted.rows:
                row.entered = self._num_steps
                if self._tails is not None:
                    self._tails.begin(row.index, row.begun)
            self._running.enter(admitted.rows, admitted.slots)
            self._prefill(admitted)
            self._replay(admitted)
            self._longest = max(row.num_tokens(0) for row in self._scheduler.running())
        self._close_gaps()
        return admitted.rows

    def _cut_cache(self, cut: Cut) -> None:
        """Give every slot another length; what runs goes on."""
        self._close_gaps()
        running = self._scheduler.running()
        self._cache.cut(
            num_slots=cut.num_slots,
            slot_tokens=cut.slot_tokens,
            num_kept=len(running),
            kept_tokens=max((row.num_tokens(self._num_steps) - 1 for row in running), default=0),
        )
        self._responses.keep(len(running), cut.num_slots)
        if len(self._rotary) < cut.slot_tokens:
            self._rotary = rotary_table(
                self._model.spec, cut.slot_tokens, device=self._model.device, dtype=self._model.dtype
            )

    def _close_gaps(self) -> None:
        """Let the running rows be in the first slots, without a gap."""
        if moves := self._scheduler.close_gaps():
            source, target = [list(slots) for slots in zip(*moves, strict=True)]
            self._cache.copy(source, target, self._span())
            self._running.move(source, target)
            self._responses.move(source, target)
        self._longest = max((row.num_tokens(0) for row in self._scheduler.running()), default=0)

    def _prefill(self, admitted: Admission) -> None:
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
            self._model.prefill(self._pack(prompts, [slots[i] for i in indices]), self._cache)

    def _pack(self, prompts: list[tuple[int, ...]], slots: list[list[int]]) -> PromptPack:
        device, lengths = self._model.device, torch.tensor([len(p) for p in prompts])
        num_tokens, longest = int(lengths.sum()), _multiple(int(lengths.max()), PROMPT_STEP)
        prompt_of = torch.repeat_interleave(torch.arange(len(prompts)), lengths)
        positions = torch.arange(num_tokens) - (lengths.cumsum(0) - lengths)[prompt_of]
        padding = (0, _multiple(num_tokens, ROW_STEP) - num_tokens)
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        return PromptPack(
            tokens=functional.pad(tokens, padding).to(device),
            rotary=self._rotary[functional.pad(positions, padding).to(device)],
            padded_index=functional.pad(prompt_of * longest + positions, padding).to(device),
            num_tokens=num_tokens,
            num_prompts=len(prompts),
            longest=longest,
            source=torch.repeat_interleave(torch.tensor([len(s) for s in slots])).to(device),
            slots=torch.tensor([slot for of_prompt in slots for slot in of_prompt], device=device),
        )

    def _replay(self, admitted: Admission) -> None:
        """Put responses that were begun into the cache, all but the last token: as steps do, not as a prefill does."""
        device = self._model.device
        for row, slot in zip(admitted.rows, admitted.slots, strict=True):
            tokens = torch.tensor([row.prompt[-1], *row.begun[:-1]], device=device)[: len(row.begun)]
            positions = len(row.prompt) - 1 + torch.arange(len(tokens), device=device)
            for some, at in zip(tokens.split(REPLAY_TOKENS), positions.split(REPLAY_TOKENS), strict=True):
                if some.numel():
                    padded = functional.pad(some, (0, _multiple(len(some), ROW_STEP) - len(some)))
                    span = _multiple(int(at[-1]) + 1, SPAN_STEP)
                    self._model.replay(self._decode_step(padded, at, slice(slot, slot + 1), span), self._cache)

    def _decode_step(self, padded: Tensor, positions: Tensor, slots: slice, span: int) -> DecodeStep:
        """Tokens at positions of slots: one each, or all of one slot."""
        seen = torch.arange(span, device=positions.device) <= positions.unsqueeze(1)
        places = torch.arange(slots.start, slots.stop, device=positions.device).expand(len(positions))
        return DecodeStep(
            tokens=padded,
            rotary=self._rotary[positions],
            kv_index=self._cache.token_index(positions, places),
            mask=torch.zeros_like(seen, dtype=self._model.dtype).masked_fill_(~seen, float("-inf"))[:, None, None],
            num_rows=len(positions),
            slots=slots,
        )

    def _step(self) -> list[EndedRow]:
        """The next token of each running row; rows that it ends leave."""
        num_rows, running = self._scheduler.num_running, self._running
        padded, positions = _multiple(num_rows, ROW_STEP), running.get(Column.POSITION, num_rows)
        span = self._span()
        self._num_steps += 1
        step = self._decode_step(running.get(Column.TOKEN, padded), positions, slice(0, num_rows), span)
        logits = self._peers.gather_logits(self._model.decode(step, self._cache))
        if logits is None:
            tokens, logprobs = positions.new_empty(padded), torch.zeros(padded, device=positions.device)
        else:
            numbers = uniforms(running.get(Column.SEED, padded), running.get(Column.NUM_SAMPLED, padded))
            tokens, logprobs = sample(logits, self._model.spec.vocab_size, numbers, self._sampling)
        tokens, logprobs = self._peers.share_tokens(tokens)[:num_rows], logprobs[:num_rows]
        self._responses.add(running.get(Column.NUM_SAMPLED, num_rows), tokens, logprobs)
        running.advance(tokens)
        return self._let_out(tokens)

    def _span(self) -> int:
        """Tokens that attention must look at: the longest running row's, rounded up."""
        return _multiple(self._longest + self._num_steps, SPAN_STEP)

    def _let_out(self, tokens: Tensor) -> list[EndedRow]:
        """Take out rows that sampled a stop token, completed a stop string, or have all their tokens."""
        stopped = (tokens == self._stop_ids.unsqueeze(1)).any(0) | self._ended_by_strings(tokens)
        ended = stopped | (self._running.get(Column.NUM_SAMPLED, tokens.numel()) >= self._sampling.max_new_tokens)
        slots = ended.nonzero().flatten().tolist()
        if not slots:
            return []
        by_token = stopped[slots].tolist()
        return self._leave(slots, [FinishReason.STOP if stop else FinishReason.LENGTH for stop in by_token])

    def _ended_by_strings(self, tokens: Tensor) -> Tensor:
        """Which rows these tokens end, bool [rows]; the leader looks at their text. Collective over the engine."""
        ended = torch.zeros_like(tokens)
        if not self._sampling.stop:
            return ended.bool()
        if self._tails is not None and self._peers.is_leader:
            rows = [row.index for row in self._scheduler.running()]
            ended = torch.tensor(self._tails.ended(rows, tokens.tolist())).to(tokens)
        return self._peers.share_tokens(ended).bool()

    def _leave(self, slots: list[int], reasons: list[FinishReason]) -> list[EndedRow]:
        """Take rows out, with the tokens that they did not come with."""
        rows = self._scheduler.finish(slots)
        new = [range(len(row.begun), row.num_sampled(self._num_steps)) for row in rows]
        read = self._responses.read(slots, new)
        if self._tails is not None:
            self._tails.forget([row.index for row in rows])
        return [
            EndedRow(row.index, *said, why, row.cached_tokens)
            for row, said, why in zip(rows, read, reasons, strict=True)
        ]


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
