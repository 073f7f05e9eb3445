"""Megatron's GPTModel with hidden states as its output, so that full logits never exist. One chunk of it."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf.families.rope import rotary_frequencies
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.transformer_config import padded_vocab_size

_TP_SEED = 2718
"""Upstream's distance between the seed of a model and that of its first tensor-parallel rank."""


class ValueHead(nn.Module):
    """Weight [1, H] of a critic, the same on all tensor-parallel ranks. Applied by the loss, like the lm head's."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=dtype, device=device))


class HiddenStatesGPT(GPTModel):
    """One chunk of the decoder. The last gives hidden states after the final norm, [T, 1, H], all T on each rank.

    The head's weight lies in `output_layer.weight` (or in the embedding when tied on one stage) and is applied by
    the loss. The backward pass of the gather over sequence-parallel ranks fits the head: each rank of an lm head adds
    its vocabulary rows' part of the gradient (reduce-scatter), a value head gives all ranks the same one (split).
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: TransformerConfig,
        layer_spec: ModuleSpec,
        *,
        head: Head,
        collection: ProcessGroupCollection,
        device: torch.device,
        seed: int,
        vp_stage: int = 0,
    ) -> None:
        stage, stages = collection.pp.rank(), collection.pp.size()
        last_chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1
        super().__init__(
            config,
            layer_spec,
            vocab_size=padded_vocab_size(spec.vocab_size, collection.tp.size()),
            max_sequence_length=spec.max_positions,
            pre_process=stage == 0 and vp_stage == 0,
            post_process=stage == stages - 1 and vp_stage == last_chunk,
            share_embeddings_and_output_weights=spec.tied_embeddings and head is Head.LM,
            position_embedding_type="rope",
            pg_collection=collection,
            vp_stage=vp_stage,
        )
        self.head = head
        if self.post_process and head is Head.VALUE:
            self.output_layer = ValueHead(spec.hidden_size, dtype=config.params_dtype, device=device)
        self.rotary_pos_emb.inv_freq = rotary_frequencies(spec).to(device)
        self.to(device)  # upstream makes a router's weight on the host and moves it at its first use
        self._rng_states = _tracker_states(seed + _TP_SEED + collection.tp.rank())
        for name, module in self.named_modules():
            _mark_tensor_parallel(module, stride=2 if name.endswith("linear_fc1") else 1)
        for name, param in self.named_parameters():
            if ".experts." in name:
                # Replicas of an expert are other ranks than those of a dense weight; upstream says so for ep > 1 only.
                param.allreduce = False

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark embedding and head. Upstream also copies a tied weight across stages; here both ends load it."""
        tied = self.share_embeddings_and_output_weights
        if self.pre_process:
            embedding = self.embedding.word_embeddings.weight
            embedding.is_embedding_or_output_parameter = True
            embedding.shared_embedding = tied and not self.post_process
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
            # `shared` leaves the copy out of the global gradient norm.
            self.output_layer.weight.shared = tied
            self.output_layer.weight.shared_embedding = tied

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """As GPTModel's, with this model's random states in Megatron's one tracker."""
        tracker = get_cuda_rng_tracker()
        tracker.set_states(self._rng_states)
        output = super().forward(*args, **kwargs)
        self._rng_states = tracker.get_states()
        return output

    def _postprocess(self, hidden_states: Tensor, **_unused: object) -> Tensor:
        if self.post_process and self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=self.head is Head.LM, group=self.pg_collection.tp
            )
        return hidden_states


def _tracker_states(seed: int) -> dict[str, Tensor]:
    """Random states of a new model: what Megatron's tracker holds after adding the seed to it."""
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.reset()
    tracker.add("model-parallel-rng", seed)
    states = tracker.get_states()
    tracker.set_states(before)
    return states


def _mark_tensor_parallel(module: nn.Module, *, stride: int) -> None:
    """Say along which dim a weight is cut: upstream says it only while it initialises weights itself."""
    dims = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
    weight = getattr(module, "weight", None)
    if type(module) in dims and weight is not None and not hasattr(weight, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dims[type(module)], stride=stride)
