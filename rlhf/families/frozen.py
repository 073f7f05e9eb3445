"""Which weights of a trained model stay as they are, from patterns over Hugging Face names. No torch, no layout."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from rlhf.config.checks import refuse
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, LogicalTensor, ModelSpec, Part

_TOGETHER = (
    (Part.Q, Part.K, Part.V),
    (Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS),
    (Part.GATE, Part.UP),
    (Part.EXPERT_GATE, Part.EXPERT_UP),
)
"""Parts of a layer that lie in one Megatron parameter, which is trained whole or not at all."""


def frozen_tensors(spec: ModelSpec, patterns: Sequence[str], *, head: Head, where: str) -> frozenset[str]:
    """Logical names of the weights that training leaves alone: those that match any pattern.

    Args:
        spec: The model.
        patterns: Names, in which * stands for any characters, ? for one and [...] for one of some.
        head: What stands on top of it. A tied lm head is the embedding and goes by its name.
        where: The setting's name in a message.

    Raises:
        ConfigError: A pattern matches nothing; all weights are frozen; or some are, but others are not, that Megatron
            holds in one parameter with them or cannot train without them.
    """
    tensors = logical_tensors(spec, head=head)
    names = [tensor.name for tensor in tensors]
    frozen: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            refuse(
                f"{where}: {pattern!r} matches none of the model's {len(names)} weights; {_cure(pattern, names, spec)}"
            )
        frozen |= found
    if len(frozen) == len(names):
        refuse(f"{where}: {list(patterns)} match all {len(names)} weights; needs one to train; freeze fewer")
    _check_together(tensors, frozen, where)
    return frozenset(frozen)


def changing_tensors(spec: ModelSpec, patterns: Sequence[str], *, head: Head, where: str) -> frozenset[str]:
    """Logical names of the weights that training can change: all that `frozen_tensors` does not name."""
    frozen = frozen_tensors(spec, patterns, head=head, where=where)
    return frozenset(tensor.name for tensor in logical_tensors(spec, head=head)) - frozen


def _check_together(tensors: Sequence[LogicalTensor], frozen: set[str], where: str) -> None:
    of_place: dict[tuple[int, int], dict[Part, str]] = {}
    of_experts: dict[tuple[int, Part], list[str]] = {}
    for tensor in tensors:
        if tensor.expert >= 0:
            of_experts.setdefault((tensor.layer, tensor.part), []).append(tensor.name)
        if tensor.layer >= 0:
            of_place.setdefault((tensor.layer, tensor.expert), {})[tensor.part] = tensor.name
    for names in of_place.values():
        for parts in _TOGETHER:
            together = [names[part] for part in parts if part in names]
            trained = [name for name in together if name not in frozen]
            if trained and len(trained) < len(together):
                stays = next(name for name in together if name in frozen)
                refuse(
                    f"{where}: {stays} is frozen, {', '.join(trained)} is not; Megatron holds them in one parameter; "
                    "freeze all of them or none"
                )
        # Megatron's linear layer with a frozen weight gives its bias no gradient.
        if names.get(Part.Q) in frozen and names.get(Part.Q_BIAS, "") not in {"", *frozen}:
            refuse(
                f"{where}: {names[Part.Q]} is frozen, {names[Part.Q_BIAS]} is not; Megatron trains no bias beside a "
                "frozen weight; freeze the biases too"
            )
    for of_layer in of_experts.values():
        if 0 < len(frozen.intersection(of_layer)) < len(of_layer):
            stays = next(name for name in of_layer if name in frozen)
            trained = [name for name in of_layer if name not in frozen]
            refuse(
                f"{where}: {stays} is frozen, {trained[0]} is not; ranks hold different experts of a layer and "
                "must train alike; freeze this part of all its experts or of none"
            )


def _cure(pattern: str, names: Sequence[str], spec: ModelSpec) -> str:
    if spec.tied_embeddings and fnmatchcase("lm_head.weight", pattern):
        return f"the lm head is the embedding; freeze {names[0]}, or leave it out"
    if any(name.startswith(f"{pattern.rstrip('.')}.") for name in names):
        return f"it begins the names of some; write {pattern.rstrip('.')}.*"
    near = get_close_matches(pattern, names, n=3, cutoff=0.0)
    return f"the nearest are {', '.join(near)}; use one of them, or a pattern"
