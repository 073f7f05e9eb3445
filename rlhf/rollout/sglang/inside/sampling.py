"""How SGLang's schedulers sample here: tokens by seed and place in the response, and where responses end.

SGLang draws from one random state a scheduler, unless it runs its batch-invariant kernels, which it has for GPUs only.
A sampler of ours, registered for one of its sampling backends, draws each row's token by `rlhf.rollout.draw` instead,
as the embedded engine does: what a sample gets then depends neither on the batch nor on the engine. Runs in SGLang's
processes; imports SGLang where it is called.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.rollout.draw import BLOCK, Cuts, block_sums, draw, largest
from rlhf.rollout.seeds import uniforms
from rlhf.rollout.stopping import Decode, StopStrings

BACKEND = "pytorch"
"""SGLang's sampling backend that ours takes the place of: on CPUs, and with its batch-invariant kernels, SGLang
chooses this one whatever it is told."""
STOP, BEGUN = "rlhf_stop", "rlhf_begun"
"""Of a request's `custom_params`: its stop strings; how many of its input tokens begin the response."""


def draw_by_seed() -> None:
    """Have this process's scheduler draw by our sampler; before it is made."""
    from sglang.srt.layers.sampler import register_sampler_backend  # noqa: PLC0415
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: PLC0415

    register_sampler_backend(BACKEND, _sampler_by_seed)
    plain = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: type, batch: Any, vocab_size: int) -> Any:
        """Keeps the requests' seeds, which SGLang drops without its batch-invariant kernels."""
        made = plain(cls, batch, vocab_size)
        seeds = [req.sampling_params.sampling_seed or 0 for req in batch.reqs]
        made.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(made.device, non_blocking=True)
        return made

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)


def stop_by_strings(decode: bytes) -> None:
    """Have this process's scheduler end responses by `StopStrings`; before it is made. `decode`: a pickled `Decode`."""
    from sglang.srt.managers.schedule_batch import Req  # noqa: PLC0415

    search = _Search(pickle.loads(decode))
    Req._check_str_based_finish = lambda req, new_tokens=1: search.finish(req, new_tokens)


def end_before_abort() -> None:
    """Have this process's scheduler look whether a request that it stops has just ended; before it is made.

    SGLang gives a running request that is to be aborted one more token, and says "aborted" whatever that is. Behind its
    end such a response would go on once it is continued.
    """
    from sglang.srt.managers.schedule_batch import Req  # noqa: PLC0415

    plain = Req.update_finish_state

    def update(req: Any, new_accepted_len: int = 1) -> None:
        abort = req.to_finish
        if abort is None or abort.status_code is not None or not new_accepted_len:  # with a status: a fault of its own
            plain(req, new_accepted_len)
            return
        req.to_finish = None
        plain(req, new_accepted_len)
        if not req.finished():
            req.to_finish = abort
            plain(req, new_accepted_len)

    Req.update_finish_state = update


def _sampler_by_seed() -> Any:
    from sglang.srt.layers.sampler import Sampler  # noqa: PLC0415

    class SamplerBySeed(Sampler):  # type: ignore[misc]  # without annotations
        def _sample_from_probs(
            self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
        ) -> tuple[Tensor, None]:
            return tokens_by_seed(probs, sampling_info, positions), None

    return SamplerBySeed()


def tokens_by_seed(probs: Tensor, info: Any, positions: Tensor) -> Tensor:
    """Tokens, int32 [N], from SGLang's probabilities [N, V] after the temperature; `info` is its SamplingBatchInfo.

    positions: int64 [N], of each row's last token in its sequence; seeds are shifted so that they count from the
    beginning of the response (`rlhf.rollout.seeds.shifted`). Rows of temperature 0 have top_k 1 and take the largest.
    """
    weights = functional.pad(probs.float(), (0, -probs.shape[1] % BLOCK))
    vocab, top_k = weights.shape[1], info.top_ks.long()
    cuts = Cuts(
        top_k=top_k,
        top_p=info.top_ps.double(),
        min_p=info.min_ps,
        widest=_widest(info, top_k, vocab),
        all_have_top_k=info.max_top_k is not None and info.max_top_k < vocab,
        any_top_p=info.need_top_p_sampling,
        any_min_p=info.need_min_p_sampling,
    )
    tokens = draw(weights, block_sums(weights), uniforms(info.sampling_seed, positions.long()), cuts)
    if info.is_any_greedy:
        tokens = torch.where(top_k == 1, largest(weights), tokens)
    return tokens.int()


def _widest(info: Any, top_k: Tensor, vocab: int) -> int:
    if not info.need_top_k_sampling:
        return 0
    if info.max_top_k is not None and info.max_top_k < vocab:
        return info.max_top_k
    return int(top_k.where(top_k < vocab, 0).max())


class _Search:
    """Stop strings of a scheduler's requests."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[tuple[str, ...], StopStrings] = {}

    def finish(self, req: Any, new_tokens: int) -> bool:
        """In place of `Req._check_str_based_finish`: end the request where one of its newest tokens ends it."""
        from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR  # noqa: PLC0415

        asked = req.sampling_params.custom_params or {}
        if not (texts := tuple(asked.get(STOP, ()))):
            return False
        if (strings := self._known.get(texts)) is None:
            strings = self._known[texts] = StopStrings(texts, self._decode)
        begun = asked.get(BEGUN, 0)
        for end in range(max(1, len(req.output_ids) - new_tokens + 1), len(req.output_ids) + 1):
            if strings.ended(_tail(req, begun, end, strings.span)):
                req.finished_reason, req.finished_len = FINISH_MATCHED_STR(matched=texts[0]), end
                return True
        return False


def _tail(req: Any, begun: int, end: int, span: int) -> Sequence[int]:
    """The last `span` tokens of a response, part of which may have come with the request."""
    new = list(req.output_ids[max(0, end - span) : end])
    before = min(begun, span - len(new))
    return [*req.origin_input_ids[len(req.origin_input_ids) - before :], *new]
