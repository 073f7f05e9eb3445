"""What the tests of prompts share: a tokenizer and files of rows."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf.config.data import DataConfig
from rlhf.data.tokenizer import load_tokenizer, tiny_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(folder: Path, *, chat: bool = False) -> PreTrainedTokenizerBase:
    """One token a byte, read back from the folder."""
    made = tiny_tokenizer(folder)
    if chat:
        made.chat_template = CHAT
        made.save_pretrained(str(folder))
    return load_tokenizer(folder)


def write_jsonl(path: Path, rows: list) -> Path:
    """Rows as JSON lines; a str is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def file_config(path: Path, **options) -> DataConfig:
    """Plain-text settings for a file."""
    source = "parquet" if path.suffix == ".parquet" else "jsonl"
    return DataConfig(**{"source": source, "path": str(path), "chat_template": False, "held_out": 0, **options})


def gym_config(task: str, **options) -> DataConfig:
    """Plain-text settings for a generated task."""
    return DataConfig(**{"source": "reasoning_gym", "task": task, "chat_template": False, **options})
