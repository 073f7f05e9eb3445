"""Legacy folders of Megatron-LM, cut by independent code, are read to the bit; what is wrong with one is refused."""

import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.checkpoint.convert.opening import open_weights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.sources import Place, Wanted, Weights
from rlhf.checkpoint.legacy.file import FILE_NAME
from rlhf.checkpoint.legacy.weights import LegacyWeights
from rlhf.errors import CheckpointError
from rlhf.families.registry import read_spec
from rlhf.reshard.layout import Box
from tests.checkpoint.megatron_lm import args_of, save_dense, save_rank
from tests.mcore.tiny import make_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for case in ("llama", "qwen2"):
        make_checkpoint(case, root / case)
    return root


def saved(models: Path, case: str, folder: Path, *, tp: int, chunks: tuple[tuple[int, ...], ...]) -> Given:
    save_dense(folder, read_spec(models / case), load_file(models / case / "model.safetensors"), tp=tp, chunks=chunks)
    return Given(folder, config_from=models / case)


def check_all(weights: Weights, expected: dict[str, torch.Tensor]) -> None:
    """Every tensor is the expected one; each is read in two parts that cut rows or columns."""
    assert weights.dtypes == {name: weight.dtype for name, weight in expected.items()}
    for name, weight in expected.items():
        found, whole = torch.full_like(weight, torch.nan), [(0, extent) for extent in weight.shape]
        for span in ((0, weight.shape[-1] // 3), (weight.shape[-1] // 3, weight.shape[-1])):
            box = Box((*whole[:-1], span))
            weights.read([Wanted(name, box, found[box.slices])])
        assert torch.equal(found, weight), name


@pytest.mark.parametrize(
    ("case", "tp", "chunks"),
    [("llama", 2, ((1, 1), (1, 1))), ("llama", 1, ((4,),)), ("qwen2", 4, ((1,), (3,))), ("qwen2", 2, ((4,),))],
)
def test_every_tensor_is_read_to_the_bit(models, tmp_path, case, tp, chunks) -> None:
    given = saved(models, case, tmp_path / "ckpt", tp=tp, chunks=chunks)
    weights = open_weights(given)
    assert isinstance(weights, LegacyWeights)
    check_all(weights, load_file(models / case / "model.safetensors"))
    told = {(one.place, one.tensor) for one in weights.remarks}
    assert (Place.PADDED, "model.embed_tokens.weight") in told
    assert ((Place.TIED, "lm_head.weight") in told) == (case == "qwen2")
    assert ((Place.REPLICATED, "model.norm.weight") in told) == (tp > 1)
    assert {(Place.DROPPED, "optimizer"), (Place.DROPPED, "rng_state")} <= told


class Evil:
    """What would write a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


class Harmless:
    """A class of the user's own, which is not built either."""


@pytest.mark.parametrize("place", ["args", "model", "beside"])
def test_a_file_that_would_run_code_is_refused_and_runs_none(models, tmp_path, place) -> None:
    given = saved(models, "llama", tmp_path / "ckpt", tp=1, chunks=((4,),))
    path = tmp_path / "ckpt" / "iter_0000070" / "mp_rank_00" / FILE_NAME
    spec, evil = read_spec(models / "llama"), Evil(tmp_path / "mark")
    args, model = args_of(spec, tp=1, pp=1, vpp=1), {"a": torch.ones(3)}
    others = {}
    if place == "args":
        args.hook = [evil]
    elif place == "model":
        model["b"] = evil
    else:
        others["more"] = {"deep": (evil,)}
    save_rank(path, args, [model], **others)
    with pytest.raises(CheckpointError, match=r"mp_rank_00/model_optim_rng.pt: asks for (posix|nt)\.system; needs"):
        open_weights(given)
    assert not (tmp_path / "mark").exists()
    save_rank(path, args_of(spec, tp=1, pp=1, vpp=1), [{"a": torch.ones(3)}], more=Harmless())
    with pytest.raises(CheckpointError, match=r"asks for tests\.checkpoint\.test_legacy_weights\.Harmless"):
        open_weights(given)


def rewritten(path: Path, method: int, num_bytes: int | None) -> None:
    """The same archive, but the elements of each tensor are compressed or fewer; nothing else tells."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            if "/data/" in name:
                archive.writestr(name, data[:num_bytes], method)
            else:
                archive.writestr(name, data)


def test_what_is_wrong_with_a_folder_is_said_by_name(models, tmp_path) -> None:
    folder = tmp_path / "ckpt"
    given = saved(models, "llama", folder, tp=2, chunks=((2,), (2,)))
    path = folder / "iter_0000070" / "mp_rank_01_001" / FILE_NAME
    whole = path.read_bytes()

    def refused(pattern: str) -> None:
        with pytest.raises(CheckpointError, match=pattern):
            open_weights(given)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole)

    def changed(change) -> None:
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)

    changed(lambda content: content.update(checkpoint_version=2.0))
    refused(r"mp_rank_01_001.*checkpoint_version 2\.0; needs 3\.0")
    changed(lambda content: content.pop("args"))
    refused("mp_rank_01_001.*no args")
    changed(lambda content: content["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"))
    refused(r"mp_rank_01_001.*no tensor decoder\.layers\.1\.mlp\.linear_fc2\.weight")
    changed(lambda content: content["model"].update({"decoder.layers.1.mlp.router.expert_bias": torch.ones(2)}))
    refused(r"decoder\.layers\.1\.mlp\.router\.expert_bias: no such tensor in this model of family llama")
    changed(lambda content: content["model"].update({"decoder.final_layernorm.weight": torch.ones(47)}))
    refused(r"decoder\.final_layernorm\.weight has shape \[47\]; needs \[48\]")
    changed(lambda content: content.update(model1=content["model"]))
    refused("holds model, model1; needs model, or model0, model1")
    changed(lambda content: content.update(model0=content["model"], model1=content.pop("model")))
    refused("mp_rank_01_001.*2 model chunks; needs 1")
    changed(lambda content: content["model"].update({"decoder.final_layernorm.weight": torch.ones(96)[::2]}))
    refused(r"decoder\.final_layernorm\.weight is torch.float32 of strides \(2,\)")
    for method, num_bytes in ((zipfile.ZIP_STORED, -4), (zipfile.ZIP_DEFLATED, None)):
        rewritten(path, method, num_bytes)
        refused("mp_rank_01_001.*no elements of .* where they should be; needs a whole file")
    path.write_bytes(whole[: len(whole) // 2])
    refused("mp_rank_01_001.*cut short")
    path.write_bytes(whole[:-1])
    refused("mp_rank_01_001")
    path.unlink()
    refused("mp_rank_01_001/model_optim_rng.pt: no such file")
    path.unlink()
    path.parent.rmdir()
    refused("no mp_rank_01_001; needs 4 folders for tp 2, pp 2, ep 1")
    (folder / "iter_0000070" / "mp_rank_02_000").mkdir()
    refused("mp_rank_02_000, which is of another layout")


def test_replicas_that_differ_are_found_when_they_are_read(models, tmp_path) -> None:
    given = saved(models, "llama", tmp_path / "ckpt", tp=2, chunks=((4,),))
    path = tmp_path / "ckpt" / "iter_0000070" / "mp_rank_01" / FILE_NAME
    content = torch.load(path, weights_only=False)
    content["model"]["decoder.layers.2.mlp.linear_fc1.layer_norm_weight"][5] += 1e-3
    torch.save(content, path)
    weights, name = open_weights(given), "model.layers.2.post_attention_layernorm.weight"
    with pytest.raises(CheckpointError, match=f"mp_rank_01.*{name} differs from that in .*mp_rank_00"):
        weights.read([Wanted(name, Box.of((0, 48)), torch.empty(48))])
    weights.read([Wanted(name, Box.of((6, 48)), torch.empty(42))])


def test_parameters_that_lie_in_one_buffer_are_read_from_their_places(models, tmp_path) -> None:
    """As with the distributed optimizer, whose parameters are views of one storage."""
    given = saved(models, "llama", tmp_path / "ckpt", tp=1, chunks=((4,),))
    path = tmp_path / "ckpt" / "iter_0000070" / "mp_rank_00" / FILE_NAME
    content = torch.load(path, weights_only=False)
    model = {name: weight for name, weight in content["model"].items() if weight is not None}
    buffer = torch.cat([torch.zeros(3), *(weight.reshape(-1) for weight in model.values())])
    at = 3
    for name, weight in model.items():
        content["model"][name] = torch.nn.Parameter(buffer[at : at + weight.numel()].view(weight.shape))
        at += weight.numel()
    torch.save(content, path)
    check_all(open_weights(given), load_file(models / "llama" / "model.safetensors"))


def test_a_vocabulary_smaller_than_the_configs_is_refused(models, tmp_path) -> None:
    given = saved(models, "llama", tmp_path / "ckpt", tp=1, chunks=((4,),))
    path = tmp_path / "ckpt" / "iter_0000070" / "mp_rank_00" / FILE_NAME
    content = torch.load(path, weights_only=False)
    content["model"]["embedding.word_embeddings.weight"] = torch.ones(128, 48)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="has 128 rows over 1 files; needs at least the 131"):
        open_weights(given)


def test_without_a_config_the_args_must_say_which_model_it_is(models, tmp_path) -> None:
    given = saved(models, "llama", tmp_path / "ckpt", tp=1, chunks=((4,),))
    with pytest.raises(CheckpointError, match=r"num_attention_heads in Megatron-LM's args.*--config-from"):
        open_weights(Given(given.path))
