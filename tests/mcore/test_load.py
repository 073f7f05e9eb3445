"""Loading and drawing weights: what is read, what is refused, what memory it takes. One process."""

import json
import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.errors import CheckpointError
from rlhf.families.files import HfFolder
from rlhf.families.registry import hf_config, read_spec
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import ModelGroups, make_groups
from rlhf.mcore.layout import EMBEDDING, OUTPUT, megatron_layout, param_shapes
from rlhf.mcore.load import draw_rest, draw_weights, load_weights, set_weights
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.params import local_params
from tests.mcore.stand_in import stand_in_model, tiny_moe_spec, tiny_spec
from tests.mcore.tiny import make_checkpoint


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory):
    """A job of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield make_groups(ParallelConfig(), GroupFactory(device_backend="gloo", timeout=timedelta(seconds=30)))
    dist.destroy_process_group()


def build(spec: ModelSpec, groups: ModelGroups, *, head: Head = Head.LM, seed: int = 3, **config) -> MegatronModel:
    config = ModelConfig(**{"path": "by-hand", **config})
    cpu = torch.device("cpu")
    return build_model(spec, config, ParallelConfig(), groups, head=head, device=cpu, seed=seed, trainable=False)


def test_weights_are_the_checkpoints_in_the_models_dtype(tmp_path: Path, groups: ModelGroups) -> None:
    make_checkpoint("qwen2", tmp_path)
    model = build(read_spec(tmp_path), groups, dtype="bfloat16")
    load_weights(model, tmp_path)
    params, source = local_params(model), HfFolder(tmp_path)
    for piece in megatron_layout(model.spec, model.parallel, head=Head.LM, dtype="bfloat16").holdings(0):
        found = params[piece.param][piece.param_box(piece.box).slices]
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, source.read(piece.tensor, piece.box.slices).bfloat16()), piece.tensor


def test_what_is_given_stays_and_the_rest_is_drawn_as_ever(groups: ModelGroups) -> None:
    drawn, model = (build(tiny_spec(), groups, head=Head.VALUE) for _ in range(2))
    draw_weights(drawn)
    for param in local_params(model).values():
        param.fill_(7)
    holdings = megatron_layout(model.spec, model.parallel, head=Head.VALUE, dtype="float32").holdings(0)
    draw_rest(model, given={piece.tensor for piece in holdings} - {"score.weight"})
    expected, found = local_params(drawn), local_params(model)
    for piece in holdings:
        inside = piece.param_box(piece.box).slices
        wanted = expected[piece.param][inside] if piece.tensor == "score.weight" else torch.tensor(7.0)
        assert (found[piece.param][inside] == wanted).all(), piece.tensor


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_a_rank_reads_its_own_experts_alone(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(case, tmp_path)
    spec, parallel = read_spec(tmp_path), ParallelConfig(tp=2, dp=2, ep=2, etp=2)
    read: dict[str, list[tuple[slice, ...]]] = {}
    read_block = HfFolder.read

    def recorded(folder: HfFolder, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        read.setdefault(name, []).append(box)
        return read_block(folder, name, box)

    monkeypatch.setattr(HfFolder, "read", recorded)
    model = stand_in_model(spec, parallel, 3)  # position 3 in its stage: second half of the experts and of their rows
    load_weights(model, tmp_path)
    mine = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    assert mine == set(range(6, 12))
    half = spec.moe_ffn_size // 2
    for name, boxes in read.items():
        if ".experts." in name:
            (box,) = boxes
            cut = box[1] if name.endswith(("down_proj.weight", "w2.weight")) else box[0]
            assert (cut.start, cut.stop) == (half, 2 * half), name
    params, whole = local_params(model), load_file(tmp_path / "model.safetensors")
    names = ("w1", "w3", "w2") if case == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    stem = "model.layers.1." + ("block_sparse_moe" if case == "mixtral" else "mlp")
    gate, up, down = (whole[f"{stem}.experts.8.{name}.weight"] for name in names)
    at = "decoder.layers.1.mlp.experts.local_experts.2"
    assert torch.equal(params[f"{at}.linear_fc1.weight"], torch.cat([gate[half:], up[half:]]))
    assert torch.equal(params[f"{at}.linear_fc2.weight"], down[:, half:])
    assert torch.equal(params["decoder.layers.1.mlp.router.weight"], whole[f"{stem}.gate.weight"])


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_named(tmp_path: Path, groups: ModelGroups) -> None:
    make_checkpoint("llama", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_weights(build(read_spec(tmp_path), groups), tmp_path)


def test_a_misshaped_tensor_is_named_with_both_shapes(tmp_path: Path, groups: ModelGroups) -> None:
    make_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 130}))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight has shape \(131, 48\); needs \(130, 48\)"):
        load_weights(build(read_spec(tmp_path), groups), tmp_path)


def test_a_value_head_comes_from_a_reward_model_or_from_the_seed(
    tmp_path: Path, groups: ModelGroups, caplog: pytest.LogCaptureFixture
) -> None:
    reward_model = make_checkpoint("llama", tmp_path / "reward", num_labels=1)
    make_checkpoint("llama", tmp_path / "actor")
    spec = read_spec(tmp_path / "actor")
    model = build(spec, groups, head=Head.VALUE)
    load_weights(model, tmp_path / "reward")
    assert torch.equal(local_params(model)[OUTPUT], reward_model.score.weight)
    heads = []
    for seed in (3, 3, 4):
        fresh = build(spec, groups, head=Head.VALUE, seed=seed)
        with caplog.at_level(logging.INFO):
            load_weights(fresh, tmp_path / "actor")
        heads.append(local_params(fresh)[OUTPUT])
    assert "no score.weight; the value head starts from the seed" in caplog.text
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].std() == pytest.approx(1 / (spec.hidden_size + 1), rel=0.5)


def drawn(spec: ModelSpec, parallel: ParallelConfig, rank: int) -> dict[str, torch.Tensor]:
    """Logical tensors as one rank of a layout draws its part of them; nan elsewhere."""
    model = stand_in_model(spec, parallel, rank)
    draw_weights(model)
    params, layout = local_params(model), megatron_layout(spec, parallel, head=Head.LM, dtype="float32")
    whole = {name: torch.full(shape, float("nan")) for name, shape in layout.tensors.items()}
    for piece in layout.holdings(rank):
        whole[piece.tensor][piece.box.slices] = params[piece.param][piece.param_box(piece.box).slices]
    return whole


def test_drawn_weights_do_not_depend_on_the_layout() -> None:
    spec = tiny_spec(vocab_size=600, family="qwen2", qkv_bias=True)  # more than two bands of rows
    whole = drawn(spec, ParallelConfig(), 0)
    assert not any(torch.isnan(x).any() for x in whole.values())
    parallel = ParallelConfig(tp=4, pp=2)
    for rank in parallel.ranks:
        for name, part in drawn(spec, parallel, rank).items():
            here = ~torch.isnan(part)
            assert torch.equal(part[here], whole[name][here]), (name, rank)
    assert whole["model.embed_tokens.weight"].std() == pytest.approx(spec.init_std, rel=0.05)
    assert (whole["model.norm.weight"] == 1).all()
    assert (whole["model.layers.1.self_attn.k_proj.bias"] == 0).all()


def test_drawn_experts_do_not_depend_on_the_layout() -> None:
    spec = tiny_moe_spec()
    whole = drawn(spec, ParallelConfig(), 0)
    parallel = ParallelConfig(tp=2, pp=2, dp=3, ep=3, etp=2)
    for rank in parallel.ranks:
        for name, part in drawn(spec, parallel, rank).items():
            here = ~torch.isnan(part)
            assert torch.equal(part[here], whole[name][here]), (name, rank)
    one, other = (whole[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in (2, 3))
    assert not torch.equal(one, other)


def test_rows_of_padding_start_at_zero_and_all_others_are_set() -> None:
    spec, parallel = tiny_spec(), ParallelConfig(tp=4)  # 131 rows: 33 on each rank, the last of which has one too many
    model = stand_in_model(spec, parallel, 3)
    shapes = param_shapes(spec, parallel, head=Head.LM, stage=0)
    params = [(name, torch.nn.Parameter(torch.full(shape, torch.nan))) for name, shape in shapes.items()]
    model.modules[0].named_parameters = lambda: iter(params)
    draw_weights(model)
    assert not [name for name, param in params if param.isnan().any()]
    for name in (EMBEDDING, OUTPUT):
        assert [bool(row.any()) for row in dict(params)[name]] == [True] * 32 + [False]


def test_random_init_reads_no_weights(tmp_path: Path, groups: ModelGroups) -> None:
    spec = tiny_spec()
    set_weights(build(spec, groups), ModelConfig(path=str(tmp_path / "no-such-folder"), init="random"))


BIG = tiny_spec(vocab_size=6001, hidden_size=512, ffn_size=1536, num_layers=6, head_dim=64, num_heads=8)
"""25 million parameters, 100 MB; the largest tensor is the embedding, 12 MB."""

SLACK = 4 * 2**20
"""Of the allocator and of the names, bytes."""


def test_growth_while_loading_stays_under_shard_plus_largest_slice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(BIG)))
    tensors = megatron_layout(BIG, ParallelConfig(), head=Head.LM, dtype="float32").tensors
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    command = [sys.executable, "-W", "ignore", "-m", "tests.mcore.measure_load", str(tmp_path)]
    # what is freed goes back at once: else malloc keeps some of it, more or less by chance
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], env=environment
    )
    found = json.loads(out.stdout.splitlines()[-1])
    bound = found["shard"] + found["largest_slice"] + SLACK
    assert found["shard"] - SLACK < found["growth"] < bound, found
    assert found["growth_of_a_cheat"] > bound, f"the measurement does not notice a whole read: {found}"
