"""A Megatron TransformerConfig from a model's numbers, its layout and how it is held. Pure; makes no tensor."""

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtype of a ModelConfig.dtype."""


class StageLayout(PipelineParallelLayerLayout):
    """Layers of each model chunk, any counts, seen from one pipeline stage.

    Upstream's methods fall back on the global parallel state for the stage, and on chunk 0 when that state knows of no
    chunks; here they answer for `pp_rank`, and a stage of several chunks must be asked about one of them.
    """

    def __init__(self, chunk_layers: tuple[int, ...], *, pp: int, pp_rank: int) -> None:
        chunks = [["decoder"] * count for count in chunk_layers]
        chunks[0].insert(0, "embedding")
        chunks[-1].append("loss")
        super().__init__(chunks, pp)
        self.pp_rank = pp_rank
        self.chunk_layers = chunk_layers

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of a kind in a chunk of this stage."""
        return self.layout[self.pp_rank if pp_rank is None else pp_rank][self._chunk(vp_stage)].count(layer_type)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of a kind in the chunks before this one, in the order of the model."""
        stage, chunk = self.pp_rank if pp_rank is None else pp_rank, self._chunk(vp_stage)
        before = [one[at] for at in range(chunk) for one in self.layout] + [one[chunk] for one in self.layout[:stage]]
        return sum(layers.count(layer_type) for layers in before)

    def _chunk(self, vp_stage: int | None) -> int:
        assert vp_stage is not None or self.virtual_pipeline_model_parallel_size == 1, "which chunk of the stage?"
        return vp_stage or 0


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Vocabulary rows over all tensor-parallel ranks: the next multiple of tp."""
    return -(-vocab_size // tp) * tp


def make_transformer_config(
    spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig, *, pp_rank: int, use_te: bool, on_cpu: bool
) -> TransformerConfig:
    """Megatron's config of one stage of a model.

    Weights are left unset (`load_weights` or random initialisation fills them), there is no dropout, and losses are
    sums: nothing divides by microbatches or replicas (`calculate_per_token_loss`).
    """
    dtype = DTYPES[model.dtype]
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.moe_ffn_size or spec.ffn_size,  # experts would copy a config that says otherwise
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        sequence_parallel=parallel.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        **_expert_settings(spec, parallel, use_te=use_te),
        # Packed microbatches of different lengths; upstream demands the dispatcher even of dense models.
        variable_seq_lengths=True,
        # Of several chunks: the mode that interleaved_p2p.py is made for.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        moe_token_dispatcher_type="alltoall",
        recompute_granularity="full" if model.recompute == "full" else None,
        recompute_method="uniform" if model.recompute == "full" else None,
        recompute_num_layers=1 if model.recompute == "full" else None,
        bias_activation_fusion=True,
        bias_dropout_fusion=use_te,
        apply_rope_fusion=use_te,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    # Set afterwards: __post_init__ would replace a layout that is handed in by one that asks the global for the stage.
    config.virtual_pipeline_model_parallel_size = parallel.vpp if parallel.vpp > 1 else None
    config.pipeline_model_parallel_layout = StageLayout(
        parallel.chunk_layers(spec.num_layers, where="parallel"), pp=parallel.pp, pp_rank=pp_rank
    )
    return config


def _expert_settings(spec: ModelSpec, parallel: ParallelConfig, *, use_te: bool) -> dict[str, Any]:
    """What TransformerConfig takes beyond a dense model's; nothing balances, drops or pads tokens.

    Upstream's softmax after the choice of experts is the softmax over all of them, divided by the sum of the chosen.
    """
    if not spec.num_experts:
        return {}
    return {
        "num_moe_experts": spec.num_experts,
        "moe_router_topk": spec.experts_per_token,
        "moe_ffn_hidden_size": spec.moe_ffn_size,
        "moe_router_pre_softmax": not spec.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": use_te,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }
