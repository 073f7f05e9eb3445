"""Rows of a microbatch laid end to end, as Megatron takes them, and where the predictions of responses are found.

Shape letters: n = tokens of the microbatch, padding included; R = response tokens in it.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhf.data.batch import Sequences
from rlhf.errors import ShapeError


@dataclass(frozen=True, slots=True)
class PackedMicrobatch:
    """What one forward pass takes."""

    tokens: Tensor
    """int64 [1, n]."""
    positions: Tensor
    """int64 [1, n], from 0 in each sequence."""
    params: PackedSeqParams
    """Where the sequences begin (`thd`); a last dummy sequence may fill up n."""
    predict_index: Tensor
    """int64 [R]: the position whose hidden state predicts each response token, the one before it."""
    targets: Tensor
    """int64 [R]: the response tokens, row after row."""


def check_sequences(sequences: Sequences, *, vocab_size: int, sliding_window: int = 0) -> None:
    """Raise ShapeError when a row has no prompt token or a token is outside the vocabulary.

    So also for a row that is longer than the model's sliding window (0: it has none).
    """
    lengths, responses = sequences.tokens.lengths, sequences.response_lengths
    bad = ((responses < 0) | (responses >= lengths)).nonzero()[:, 0]
    if len(bad):
        row = int(bad[0])
        raise ShapeError(
            f"sequences: row {row} (sample {int(sequences.sample_ids[row])}) has {int(lengths[row])} tokens, "
            f"{int(responses[row])} of them response; needs at least one token before the response"
        )
    if sliding_window and len(lengths) and int(lengths.max()) > sliding_window:
        row = int(lengths.argmax())
        raise ShapeError(
            f"sequences: row {row} (sample {int(sequences.sample_ids[row])}) has {int(lengths[row])} tokens; the model "
            f"looks back over sliding_window = {sliding_window} of them only, which is not implemented; needs shorter "
            "rows; limit them, or choose a model without a window"
        )
    tokens = sequences.tokens.values
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ShapeError(
            f"sequences: token ids {int(tokens.min())}..{int(tokens.max())}; the model has 0..{vocab_size - 1}; "
            "use the tokenizer of the model's own folder"
        )


def pack(sequences: Sequences, *, multiple_of: int, device: torch.device) -> PackedMicrobatch:
    """Rows (checked before, on the host) as one microbatch on a device.

    n is a multiple of `multiple_of` (tp, since sequence parallelism cuts n): a dummy sequence of zeros that nothing
    predicts fills the rest. Without rows the microbatch is such a dummy alone, with R = 0.
    """
    lengths, responses = sequences.tokens.lengths, sequences.response_lengths
    used = sequences.tokens.values.numel()
    fill = -used % multiple_of if used else multiple_of
    tokens = torch.cat([sequences.tokens.values, sequences.tokens.values.new_zeros(fill)])
    all_lengths = torch.cat([lengths, lengths.new_tensor([fill])]) if fill else lengths
    ends = all_lengths.cumsum(0)
    first_prediction = ends[: len(lengths)] - responses - 1
    predict_index = first_prediction.repeat_interleave(responses) + _ramps(responses)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32)
    longest = int(all_lengths.max())
    return PackedMicrobatch(
        tokens=tokens[None].to(device),
        positions=_ramps(all_lengths)[None].to(device),
        params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        predict_index=predict_index.to(device),
        targets=tokens[predict_index + 1].to(device),
    )


def _ramps(lengths: Tensor) -> Tensor:
    """int64 [sum lengths]: 0, 1, .. in each row."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
