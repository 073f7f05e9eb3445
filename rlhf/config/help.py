"""The text of --help: usage, examples, and every key with its type, default and docstring."""

import json
import textwrap
from collections.abc import Mapping

from rlhf.config.schema import Key, keys_of

USAGE = """\
Train a language model by reinforcement learning or fine-tuning.

usage: torchrun --nproc-per-node RANKS -m rlhf.train CONFIG.yaml [KEY=VALUE ...]
       python -m rlhf.train CONFIG.yaml [KEY=VALUE ...]      (one process)
       python -m rlhf.train CONFIG.yaml [KEY=VALUE ...] --check [--world-size N] [--gpus-per-node N] [--gpu-memory GIB]
                                                             (looks at the run, starts nothing; see --check --help)

CONFIG.yaml holds the keys below as nested sections; each KEY=VALUE replaces one of them.

examples:
  torchrun --nproc-per-node 2 -m rlhf.train configs/quickstart/ppo.yaml
  torchrun --nproc-per-node 2 -m rlhf.train configs/quickstart/ppo.yaml name=low_kl ppo.kl_coef=0.001
  python -m rlhf.train configs/debug/sft_tiny.yaml num_steps=5 actor.optim.lr=1e-3
  python -m rlhf.train configs/debug/ppo_tiny.yaml 'data.task_options={min_digits: 1, max_digits: 1}'
A value may refer to another: critic.model.path='${actor.model.path}'
"""
WIDTH = 110


def help_text(trainers: Mapping[str, type]) -> str:
    """Usage and all keys: those that every trainer has alike, then those of each one alone."""
    keys = {name: keys_of(cls) for name, cls in trainers.items()}
    common = [key for key in next(iter(keys.values())) if all(key in mine for mine in keys.values())]
    parts = [USAGE, _group("Keys of every run", common)]
    for name, mine in keys.items():
        parts.append(_group(f"Keys of trainer: {name}", [key for key in mine if key not in common]))
    return "\n".join(parts)


def _group(title: str, keys: list[Key]) -> str:
    return "\n".join([f"{title}\n", *(_entry(key) for key in keys), ""])


def _entry(key: Key) -> str:
    default = "required" if key.required else f"default {_shown(key.default)}"
    doc = textwrap.wrap(key.doc, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([f"  {key.path}  ({key.type_name}, {default})", *doc])


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
