"""From a Hugging Face config to a `ModelSpec` and back, and the list of tensors that a spec implies."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, DamagedError
from rlhf.families.family import EXPERT_COUNT_KEYS, Family, TensorRule
from rlhf.families.llama import LLAMA
from rlhf.families.mistral import MISTRAL
from rlhf.families.mixtral import MIXTRAL
from rlhf.families.qwen2 import QWEN2
from rlhf.families.qwen3 import QWEN3
from rlhf.families.qwen3_moe import QWEN3_MOE
from rlhf.families.rope import positive_number, read_rope, rope_entries
from rlhf.families.spec import Head, LogicalTensor, ModelSpec

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL)

_REFUSED_ANYWHERE: Mapping[str, object] = {
    "hidden_act": "silu",
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": None,
}
_REFUSED_DENSE: Mapping[str, object] = dict.fromkeys(EXPERT_COUNT_KEYS)


def read_spec(folder: Path) -> ModelSpec:
    """Spec of the model in a Hugging Face checkpoint folder, from its config.json alone.

    Raises:
        CheckpointError: No readable config, an unknown architecture, or a feature that no family here has.
    """
    path = folder / "config.json"
    return spec_of(read_json(path), where=str(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint folder.

    Raises:
        CheckpointError: The file is missing or is not a JSON object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; needs a Hugging Face checkpoint folder; correct model.path")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedError(f"{path}: not JSON ({error}); needs a JSON object; fetch the file again") from error
    if not isinstance(found, dict):
        raise DamagedError(f"{path}: holds a {type(found).__name__}; needs a JSON object; fetch the file again")
    return found


def spec_of(config: Mapping[str, Any], *, where: str) -> ModelSpec:
    """Spec from the content of a config.json (written by transformers 4.x or 5.x).

    Raises:
        CheckpointError: See `read_spec`.
    """
    family = _family_of(config, where)
    _refuse(family, config, where)
    entries = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    hidden, heads = _positive(entries, "hidden_size", where), _positive(entries, "num_attention_heads", where)
    kv_heads = _positive({"num_key_value_heads": heads, **entries}, "num_key_value_heads", where)
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads = {heads}, num_key_value_heads = {kv_heads}; needs a multiple; change one"
        )
    if "head_dim" not in entries and hidden % heads:
        raise CheckpointError(
            f"{where}: hidden_size = {hidden} is no multiple of num_attention_heads = {heads}; add head_dim"
        )
    head_dim = _positive({"head_dim": hidden // heads, **entries}, "head_dim", where)
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim = {head_dim}; needs an even number, whose halves rotate; correct it")
    if not isinstance(entries["tie_word_embeddings"], bool):
        raise CheckpointError(
            f"{where}: tie_word_embeddings is {entries['tie_word_embeddings']!r}; needs true or false; correct the file"
        )
    max_positions = _positive(entries, "max_position_embeddings", where)
    rope_theta, rope_scaling = read_rope(entries, max_positions=max_positions, where=where)
    return ModelSpec(
        family=family.name,
        vocab_size=_positive(entries, "vocab_size", where),
        hidden_size=hidden,
        ffn_size=_positive(entries, "intermediate_size", where),
        num_layers=_positive(entries, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=positive_number(entries, "rms_norm_eps", where),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_positions=max_positions,
        tied_embeddings=entries["tie_word_embeddings"],
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        init_std=positive_number(entries, "initializer_range", where),
        sliding_window=_window(family, config, where),
        **_experts_of(family, entries, where),
    )


def head_of(config: Mapping[str, Any], spec: ModelSpec) -> Head:
    """The head that a config.json names: a value head for a sequence classifier."""
    return Head.VALUE if family_of(spec).architectures[1] in (config.get("architectures") or []) else Head.LM


def hf_config(spec: ModelSpec, *, head: Head = Head.LM, dtype: str = "float32") -> dict[str, object]:
    """Content of a config.json that transformers 4.x and 5.x read back to the same model.

    Token ids (bos, eos, pad) are the tokenizer's business and are not part of it.
    """
    family = family_of(spec)
    entries: dict[str, object] = {
        "architectures": [family.architectures[0 if head is Head.LM else 1]],
        "model_type": family.name,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_embeddings,
        "initializer_range": spec.init_std,
        "dtype": dtype,
        "torch_dtype": dtype,
        **family.refused,
        **({"sliding_window": spec.sliding_window or None} if "sliding_window" in family.defaults else {}),
        **_expert_entries(family, spec),
        **rope_entries(spec),
    }
    if head is Head.VALUE:
        entries |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return entries


@lru_cache(maxsize=4)  # layouts ask again for each stage; a model with experts has tens of thousands
def logical_tensors(spec: ModelSpec, *, head: Head) -> tuple[LogicalTensor, ...]:
    """Every weight of the model in the order of the forward pass; a tied lm head is the embedding and not listed."""
    family, extents = family_of(spec), _extents(spec)

    def made(rule: TensorRule, layer: int = -1, expert: int = -1) -> LogicalTensor:
        shape = tuple(extents[dim] for dim in rule.dims)
        return LogicalTensor(rule.name.format(layer=layer, expert=expert), shape, rule.part, layer, expert)

    expert_rules = family.experts.rules if family.experts else ()
    tensors = [made(family.embed)]
    for layer in range(spec.num_layers):
        tensors += [made(rule, layer) for rule in family.layer]
        tensors += [made(rule, layer, expert) for expert in range(spec.num_experts) for rule in expert_rules]
    tensors.append(made(family.final_norm))
    if head is Head.VALUE:
        tensors.append(made(family.value_head))
    elif not spec.tied_embeddings:
        tensors.append(made(family.lm_head))
    return tuple(tensors)


def family_of(spec: ModelSpec) -> Family:
    """The family that a spec names.

    Raises:
        CheckpointError: No family has that name.
    """
    for family in FAMILIES:
        if family.name == spec.family:
            return family
    raise CheckpointError(f"model: family {spec.family!r}; needs one of {', '.join(f.name for f in FAMILIES)}")


def _family_of(config: Mapping[str, Any], where: str) -> Family:
    """By `architectures`; a config without it goes by `model_type`."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"{where}: architectures is {named!r}; needs a list of names; correct the file")
    for family in FAMILIES:
        if any(name in family.architectures for name in named) or (
            not named and config.get("model_type") == family.name
        ):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    found = ", ".join(named) if named else f"model_type {config.get('model_type')!r}"
    raise CheckpointError(f"{where}: architecture {found}; needs one of {known}; choose such a model")


def _refuse(family: Family, config: Mapping[str, Any], where: str) -> None:
    """Name the first feature that changes the model's function and that nothing here implements."""
    refused = _REFUSED_ANYWHERE if family.experts else {**_REFUSED_ANYWHERE, **_REFUSED_DENSE}
    for key, supported in {**refused, **family.refused}.items():
        found = config.get(key)
        if found is not None and found != supported:
            raise CheckpointError(
                f"{where}: {key} = {found!r}; needs {supported!r} for family {family.name}; choose a model without it"
            )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise CheckpointError(
            f"{where}: layer_types holds {', '.join(sorted(kinds))}; needs full_attention only; choose another model"
        )


def _positive(entries: Mapping[str, Any], key: str, where: str) -> int:
    found = entries.get(key)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        said = "missing" if found is None else f"{found!r}"
        raise CheckpointError(f"{where}: {key} is {said}; needs an integer >= 1; correct the file")
    return found


def _window(family: Family, config: Mapping[str, Any], where: str) -> int:
    """Positions that attention looks back, 0 for all. Here null and a key that is left out differ."""
    key = "sliding_window"
    if key not in family.defaults or (key in config and config[key] is None):
        return 0
    return _positive({**family.defaults, **config}, key, where)


def _experts_of(family: Family, entries: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a spec that are about experts."""
    if family.experts is None:
        return {}
    found = {key: _positive(entries, key, where) for key in EXPERT_COUNT_KEYS if key in entries}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{key} = {count}" for key, count in found.items())
        raise CheckpointError(f"{where}: {said}; needs one number; correct the file")
    count = next(iter(found.values()), 0) or _positive(entries, family.experts.count_key, where)
    per_token = _positive(entries, "num_experts_per_tok", where)
    if per_token > count:
        raise CheckpointError(
            f"{where}: num_experts_per_tok = {per_token} of {family.experts.count_key} = {count}; "
            "needs no more than there are; correct the file"
        )
    is_normed = family.experts.norm_topk_prob
    if is_normed is None:
        is_normed = entries["norm_topk_prob"]
    if not isinstance(is_normed, bool):
        raise CheckpointError(f"{where}: norm_topk_prob is {is_normed!r}; needs true or false; correct the file")
    return {
        "num_experts": count,
        "experts_per_token": per_token,
        "moe_ffn_size": _positive(entries, family.experts.ffn_key, where),
        "norm_topk_prob": is_normed,
    }


def _expert_entries(family: Family, spec: ModelSpec) -> dict[str, object]:
    """The config keys of a spec's experts."""
    if family.experts is None:
        return {}
    entries: dict[str, object] = {
        family.experts.count_key: spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        family.experts.ffn_key: spec.moe_ffn_size,
    }
    if family.experts.norm_topk_prob is None:
        entries["norm_topk_prob"] = spec.norm_topk_prob
    return entries


def _extents(spec: ModelSpec) -> dict[str, int]:
    return {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "ffn": spec.ffn_size,
        "q": spec.num_heads * spec.head_dim,
        "kv": spec.num_kv_heads * spec.head_dim,
        "head_dim": spec.head_dim,
        "experts": spec.num_experts,
        "moe_ffn": spec.moe_ffn_size,
        "one": 1,
    }
