"""A tiny PPO run that tests build in their own processes: model folder, config, ranks."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf.config.load import load_config
from rlhf.config.run import PPORunConfig
from rlhf.data.tokenizer import tiny_tokenizer
from rlhf.dist.groups import GroupFactory
from rlhf.dist.job import Ranks
from rlhf.dist.progress_clock import ProgressClock
from rlhf.dist.stop_request import StopRequest

CONFIG = """
name: tiny
trainer: ppo
num_steps: 3
actor: {{model: {{path: {model}}}, optim: {{lr: 3.0e-3}}, microbatch_tokens: 90}}
critic: {{model: {{path: {model}}}, optim: {{lr: 3.0e-3}}, microbatch_tokens: 70}}
reference: {{model: {{path: {model}}}, microbatch_tokens: 110}}
rollout: {{max_running: 5, kv_cache_tokens: 512, sampling: {{max_new_tokens: 7}}}}
data: {{source: jsonl, path: {rows}, chat_template: false, max_prompt_tokens: 24, held_out: 4}}
reward: {{function: "tests.trainers.rewards:count_low_bytes"}}
ppo: {{prompts_per_step: 5, samples_per_prompt: 2, minibatch_samples: 5, kl_coef: 0.05, entropy_coef: 0.01}}
eval: {{sampling: {{max_new_tokens: 5}}}}
job: {{device: cpu}}
log: {{folder: {folder}/runs, tensorboard: false, console: plain}}
"""


def make_files(folder: Path, *, num_layers: int = 3, ffn_size: int = 56) -> None:
    """A random model with 4 KV heads, and a file of prompts of uneven lengths."""
    import transformers  # ranks that read the files need not wait for it

    tokenizer = tiny_tokenizer(folder / "model")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=40,
        intermediate_size=ffn_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=12,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"prompt": f"{'ab' * (i % 9)}{i}=", "answer": str(i)} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = CONFIG.format(model=folder / "model", rows=folder / "rows.jsonl", folder=folder)
    (folder / "tiny.yaml").write_text(text)


def load(folder: Path, *overrides: str) -> PPORunConfig:
    """The run's config with some settings changed."""
    config = load_config([str(folder / "tiny.yaml"), *overrides])
    assert isinstance(config, PPORunConfig)
    return config


def ranks_here(run_folder: Path, groups: GroupFactory) -> Ranks:
    """This process as a rank of a CPU job, without the job's watchdog and logs."""
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_rank(),
        local_world_size=dist.get_world_size(),
        host="here",
        device=torch.device("cpu"),
        groups=groups,
        run_folder=run_folder,
        progress=ProgressClock(),
        stop=StopRequest(run_folder),
        wandb_online=False,
    )
