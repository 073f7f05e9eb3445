"""What differs between a checkpoint's run and the one that would go on from it: what may, and what may not.

What a run is stays: the data and their order, what a step is made of, how results are measured, and what the saved
state counts in. How it learns from here on and where it runs may change, and is told.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.errors import CheckpointError
from rlhf.trainers.run_record import RunRecord

FIXED: Mapping[str, str] = {
    r"trainer": "the state is another loop's",
    r"seed": "prompts, samples and minibatches are drawn from it",
    r"data\.(?!path$).*": "the prompts, their order and the held-out ones follow from it",
    r"(ppo\.(prompts_per_step|samples_per_prompt)|sft\.batch_samples)": "steps, prompts and samples are counted in it",
    r"ppo\.(kl_coef|kl_controller\.kind)": "the coefficient goes on from the saved one",
    r"ppo\.(shaping\.normalize|value_loss\.clip)": "the moments of all steps that it may need were kept or were not",
    r"reward\.function": "results before and after would not be of one task",
    r"eval\.(?!every_steps$).*": "results before and after would not be comparable",
    r"(actor|critic|reference)\.model\.dtype": "weights and optimizer state are saved in it",
    r"(actor|critic)\.freeze": "the optimizer state is of the weights that are trained",
}
"""Settings that stay, as regular expressions over their dotted paths, and why."""

_LAYOUT = re.compile(r"\w+\.parallel\..*")
_SILENT = re.compile(r"name|(log|job|profile|checkpoint)\..*|\w+\.parallel\..*")
"""Of what changed, not told, or told in other words."""


def check_changes(then: RunRecord, now: RunRecord, *, where: str) -> list[str]:
    """Refuse to go on as another run; what else has changed, in lines. Pure.

    A setting that only one side knows (of another version) is not compared.

    Raises:
        CheckpointError: All that differs and may not, with the reason of each; or no step is left to train.
    """
    faults = [*_other_settings(then, now), *_other_models(then, now), *_other_data(then, now)]
    if faults:
        raise CheckpointError(
            "\n  ".join(
                [
                    f"{where}: saved by a run that differs in what must stay; set it back, or begin anew under another "
                    "name (name=NAME) or in its place (checkpoint.resume=never):",
                    *faults,
                ]
            )
        )
    if then.step >= now.settings["num_steps"]:
        raise CheckpointError(
            f"{where}: {then.step} steps are done and num_steps = {now.settings['num_steps']}, so that none is left to "
            "train; raise num_steps to go on, or begin anew under another name (name=NAME) or in its place "
            "(checkpoint.resume=never)"
        )
    return [
        f"changed: {path} = {_shown(new)}, was {_shown(old)}"
        for path, old, new in _changed(then.settings, now.settings)
        if not _SILENT.fullmatch(path)
    ] + _moved(then, now)


def check_frozen(then: RunRecord, now: Mapping[str, str], *, where: str) -> None:
    """Refuse other weights in a role that no checkpoint holds.

    Raises:
        CheckpointError: They differ.
    """
    for role, checksum in now.items():
        if then.frozen.get(role, checksum) != checksum:
            raise CheckpointError(
                f"{where}: the weights of {role} have checksum {checksum}, and had {then.frozen[role]} when the run "
                f"was saved; needs the same ones, which are read from {role}.model.path; set it back"
            )


def same_ranks(then: RunRecord, now: RunRecord) -> bool:
    """Whether each rank holds the same parts of the same models, so that it can take its own random state."""
    return then.world_size == now.world_size and not any(
        _LAYOUT.fullmatch(path) for path, _, _ in _changed(then.settings, now.settings)
    )


def _other_settings(then: RunRecord, now: RunRecord) -> Iterator[str]:
    for path, old, new in _changed(then.settings, now.settings):
        reason = next((why for pattern, why in FIXED.items() if re.fullmatch(pattern, path)), None)
        if reason is not None:
            yield f"{path}: {_shown(new)} now, {_shown(old)} then; {reason}"


def _other_models(then: RunRecord, now: RunRecord) -> Iterator[str]:
    for role, spec in now.models.items():
        differing = [
            f"{name} {_shown(new)} now, {_shown(old)} then"
            for name, old, new in _changed(then.models.get(role, {}), spec)
        ]
        if differing:
            yield f"{role}.model.path: another model: {'; '.join(differing)}"


def _other_data(then: RunRecord, now: RunRecord) -> Iterator[str]:
    if any(then.data.get(name) != now.data.get(name) for name in ("items", "content")):
        data = now.settings["data"]
        source = f"data.task: {data['task']}" if data["source"] == "reasoning_gym" else f"data.path: {data['path']}"
        yield (
            f"{source} gives other data: {now.data['items']:,} bytes or problems with hash {now.data['content']} now, "
            f"{then.data['items']:,} with {then.data['content']} then"
        )
    tokenizer = now.data.get("tokenizer")
    if then.data.get("tokenizer", tokenizer) != tokenizer:
        yield (
            f"actor.model.path: another tokenizer or chat template, so prompts are other tokens: hash {tokenizer} now, "
            f"{then.data['tokenizer']} then"
        )


def _moved(then: RunRecord, now: RunRecord) -> list[str]:
    roles = sorted({path.partition(".")[0] for path, _, _ in _changed(then.settings, now.settings, only=_LAYOUT)})
    lines = [
        f"layout of {role}: {_sizes(now.settings[role]['parallel'])}, was {_sizes(then.settings[role]['parallel'])}"
        for role in roles
    ]
    if then.world_size != now.world_size:
        lines.append(f"ranks: {now.world_size}, were {then.world_size}")
    return lines


def _sizes(parallel: Mapping[str, Any]) -> str:
    """The sizes of a layout that are more than 1, and where its pool begins."""
    sizes = [f"{axis}{parallel[axis]}" for axis in ("tp", "pp", "vpp", "dp", "ep", "etp") if parallel.get(axis, 1) > 1]
    first = [f"from rank {parallel['first_rank']}"] if parallel.get("first_rank") else []
    stages = [f"layers {parallel['layers_per_stage']}"] if parallel.get("layers_per_stage") else []
    return " ".join([*(sizes or ["one rank"]), *stages, *first])


def _changed(
    old: Mapping[str, Any], new: Mapping[str, Any], *, only: re.Pattern[str] | None = None
) -> list[tuple[str, Any, Any]]:
    """(dotted path, old value, new value) of what both trees know and is not the same."""
    found = []
    for path, value in _leaves(new, ""):
        there = _at(old, path)
        if there is not _ABSENT and there != value and (only is None or only.fullmatch(path)):
            found.append((path, there, value))
    return found


_ABSENT = object()


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and key != "task_options":
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return _ABSENT
        tree = tree[key]
    return tree


def _shown(value: object) -> str:
    return "nothing" if value in ("", [], None) else str(value)
