"""The `args` that Megatron-LM keeps in a checkpoint: made of a spec and a layout, and read back.

Source: Megatron-LM's `load_args_from_checkpoint` and `check_checkpoint_args`, which say which of them it looks at.
"""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from rlhf.checkpoint.legacy.admitted import only_admitted
from rlhf.config.parallel import ParallelConfig
from rlhf.errors import CheckpointError
from rlhf.families.spec import ModelSpec, RopeScaling

ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
"""What Megatron-LM takes for the rest of Llama 3's scaling; its arguments give the factor alone."""


def megatron_args(
    spec: ModelSpec, parallel: ParallelConfig, *, dtype: torch.dtype, ckpt_format: str
) -> dict[str, object]:
    """The arguments under which Megatron-LM builds this model; the vocabulary is padded to a multiple of tp alone."""
    padded = -(-spec.vocab_size // parallel.tp) * parallel.tp
    experts: dict[str, object] = {"num_experts": None, "moe_ffn_hidden_size": None}
    if spec.num_experts:
        experts = {
            "num_experts": spec.num_experts,
            "moe_ffn_hidden_size": spec.moe_ffn_size,
            "moe_router_topk": spec.experts_per_token,
            "moe_router_pre_softmax": not spec.norm_topk_prob,
            "moe_router_score_function": "softmax",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_layer_freq": 1,
        }
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "group_query_attention": spec.num_kv_heads != spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "seq_length": spec.max_positions,
        "max_position_embeddings": spec.max_positions,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": spec.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": spec.rope_scaling is not None,
        "rope_scaling_factor": spec.rope_scaling.factor if spec.rope_scaling else 8.0,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "norm_epsilon": spec.norm_eps,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "window_size": (spec.sliding_window - 1, 0) if spec.sliding_window else None,
        "init_method_std": spec.init_std,
        "untie_embeddings_and_output_weights": not spec.tied_embeddings,
        "vocab_size": spec.vocab_size,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": 1,
        **experts,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "context_parallel_size": 1,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "ckpt_format": ckpt_format,
        "no_save_optim": True,
        "no_save_rng": True,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def common_state(args: Mapping[str, object]) -> dict[str, object]:
    """What Megatron-LM wants to find beside the weights: of a model that has not been trained."""
    return {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}


def read_args(path: Path) -> dict[str, object]:
    """The arguments in a file of Megatron-LM's (`common.pt`); empty where there are none that can be read.

    Nothing is built but plain values and what `admitted.py` names (enums among the arguments become StandIns): a file
    with other classes in it gives none, and neither does a damaged one.
    """
    if not path.is_file():
        return {}
    try:
        with only_admitted():
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    args = found.get("args") if isinstance(found, dict) else None
    return dict(vars(args)) if isinstance(args, argparse.Namespace) else {}


def spec_of_args(args: Mapping[str, object], *, where: str) -> ModelSpec:
    """The model that Megatron-LM's arguments describe, in the family whose features it has.

    Raises:
        CheckpointError: An argument is missing, or asks for what no family here has.
    """
    for name, needed in _NEEDED.items():
        if args.get(name, needed) != needed:
            raise CheckpointError(
                f"{where}: {name} = {args[name]!r} in Megatron-LM's args; needs {needed!r}, as the models known here; "
                "convert another model"
            )
    tied, num_experts = not args.get("untie_embeddings_and_output_weights", False), _int(args, "num_experts", where, 0)
    heads = _int(args, "num_attention_heads", where)
    qk_norm, qkv_bias = bool(args.get("qk_layernorm")), bool(args.get("add_qkv_bias"))
    is_grouped = bool(args.get("group_query_attention"))
    family = {
        (False, False, False): "llama",
        (False, True, False): "qwen2",
        (True, False, False): "qwen3",
        (True, False, True): "qwen3_moe",
        (False, False, True): "mixtral",
    }.get((qk_norm, qkv_bias, num_experts > 0))
    if family is None:
        raise CheckpointError(
            f"{where}: qk_layernorm {qk_norm}, add_qkv_bias {qkv_bias} and num_experts {num_experts} in Megatron-LM's "
            "args; needs the features of a family known here; say which model it is with --config-from"
        )
    window = _window(args, where)
    if window:
        if family != "llama":
            raise CheckpointError(
                f"{where}: window_size {args['window_size']} for a {family} in Megatron-LM's args; needs none, or a "
                "model like Mistral; say which model it is with --config-from"
            )
        family = "mistral"
    scaling = None
    if args.get("use_rope_scaling"):
        factor = _float(args, "rope_scaling_factor", where, 8.0)
        scaling = RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    experts: dict[str, object] = {}
    if num_experts:
        experts = {
            "num_experts": num_experts,
            "experts_per_token": _int(args, "moe_router_topk", where),
            "moe_ffn_size": _int(args, "moe_ffn_hidden_size", where, _int(args, "ffn_hidden_size", where)),
            "norm_topk_prob": not args.get("moe_router_pre_softmax"),
        }
    return ModelSpec(
        family=family,
        vocab_size=_int(args, "vocab_size", where),
        hidden_size=_int(args, "hidden_size", where),
        ffn_size=_int(args, "ffn_hidden_size", where),
        num_layers=_int(args, "num_layers", where),
        num_heads=heads,
        num_kv_heads=_int(args, "num_query_groups", where) if is_grouped else heads,
        head_dim=_int(args, "kv_channels", where),
        norm_eps=_float(args, "norm_epsilon", where),
        rope_theta=_float(args, "rotary_base", where, 10000.0),
        rope_scaling=scaling,
        max_positions=_int(args, "max_position_embeddings", where),
        tied_embeddings=tied,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        sliding_window=window,
        init_std=_float(args, "init_method_std", where, 0.02),
        **experts,  # type: ignore[arg-type]  # integers and one bool, each under its own name
    )


_NEEDED: Mapping[str, object] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "multi_latent_attention": False,
}


def _window(args: Mapping[str, object], where: str) -> int:
    """Positions that attention looks back, its own included, 0 for all; Megatron's count leaves its own out."""
    found = args.get("window_size")
    match found:
        case None | (-1, 0) | (-1, -1):
            return 0
        case (int(left), 0 | -1) if left >= 0:
            return left + 1
    raise CheckpointError(
        f"{where}: window_size {found} in Megatron-LM's args; needs (positions, 0) or none; convert another model"
    )


def _int(args: Mapping[str, object], name: str, where: str, default: int | None = None) -> int:
    found = args.get(name)
    if found is None:
        found = default
    if isinstance(found, bool) or not isinstance(found, int):
        raise _lacking(found, name, where)
    return found


def _float(args: Mapping[str, object], name: str, where: str, default: float | None = None) -> float:
    found = args.get(name)
    if found is None:
        found = default
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise _lacking(found, name, where)
    return float(found)


def _lacking(found: object, name: str, where: str) -> CheckpointError:
    said = "no" if found is None else f"{found!r} for"
    return CheckpointError(
        f"{where}: {said} {name} in Megatron-LM's args; needs a number; say which model it is with --config-from HF"
    )
