"""`python -m tests.mcore.megatron_writer FOLDER`: Megatron-Core alone, one process under its own parallel state.

For each case in FOLDER: its own GPTModel is saved to CASE/theirs, CASE/ours and CASE/converted/release are loaded into
it, and its logits of each are left in CASE/logits.pt. A module of its own, for Megatron's writer starts processes that
import it again.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layer_spec import prepare_megatron
from rlhf.mcore.stored import other_key, stored_shapes
from rlhf.mcore.transformer_config import make_transformer_config
from tests.mcore.stand_in import tiny_moe_spec, tiny_spec
from tests.mcore.tiny import pack, sequences

CASES = {
    "qwen2": tiny_spec(family="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": tiny_spec(family="qwen3", qk_norm=True, num_layers=3),
    "mixtral": tiny_moe_spec(family="mixtral", qk_norm=False),
}
APART = {"mixtral"}
"""Saved with each layer's tensors by themselves."""

PADDED = 256
"""Rows of its vocabulary, of which a model has 131."""


def their_model(spec: ModelSpec) -> GPTModel:
    config = make_transformer_config(
        spec, ModelConfig(path="-"), ParallelConfig(), pp_rank=0, use_te=False, on_cpu=True
    )
    config.perform_initialization = True
    experts = spec.num_experts or None
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=spec.qk_norm),
        vocab_size=PADDED,
        max_sequence_length=spec.max_positions,
        position_embedding_type="rope",
        rotary_base=int(spec.rope_theta),
        share_embeddings_and_output_weights=spec.tied_embeddings,
    )


def logits(model: GPTModel, vocab_size: int) -> Tensor:
    packed = pack(sequences(vocab_size), multiple_of=1)
    with torch.no_grad():
        out = model.eval()(packed.tokens, packed.positions, None, packed_seq_params=packed.params)
    return out[0, :, :vocab_size]


def main(folder: Path) -> None:
    prepare_megatron(torch.device("cpu"))
    torch.cuda.synchronize = lambda *_: None  # its checkpoints ask for a GPU without need
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(3)
    for case, spec in CASES.items():
        model = their_model(spec)
        found = {"theirs": logits(model, spec.vocab_size)}
        (folder / case / "theirs").mkdir()
        metadata = {"non_homogeneous_layers": True} if case in APART else None
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(folder / case / "theirs"))
        for name, place in (("ours", "ours"), ("converted", "converted/release")):
            for param in model.parameters():
                param.data.fill_(float("nan"))
            asked = model.sharded_state_dict()
            names = set(asked)
            if spec.num_experts:
                ours = {other_key(key): key for key in stored_shapes(spec, head=Head.LM)}
                for entry in asked.values():  # as Transformer Engine's layers would ask
                    entry.key = ours.get(entry.key, entry.key)
            loaded = dist_checkpointing.load(asked, str(folder / case / place))
            model.load_state_dict({key: loaded[key] for key in names})  # a converted folder also holds args
            found[name] = logits(model, spec.vocab_size)
        torch.save(found, folder / case / "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
