import pytest

from megatron_patches.registry import CPU, LAYOUTS, LOCAL_LAYERS, apply, choose, runs_on_host


def test_a_cpu_needs_everything() -> None:
    assert choose(has_cuda=False, has_te=False) == (*LAYOUTS, *CPU, *LOCAL_LAYERS)


def test_transformer_engine_without_a_gpu_changes_nothing() -> None:
    assert choose(has_cuda=False, has_te=True) == choose(has_cuda=False, has_te=False)


def test_a_gpu_with_transformer_engine_needs_only_the_layouts() -> None:
    assert choose(has_cuda=True, has_te=True) == LAYOUTS


def test_a_gpu_without_transformer_engine_needs_our_layers_but_no_device_shims() -> None:
    assert choose(has_cuda=True, has_te=False) == (*LAYOUTS, *LOCAL_LAYERS)


def test_all_apply_to_the_pinned_megatron_twice() -> None:
    apply(choose(has_cuda=False, has_te=False))
    apply(choose(has_cuda=False, has_te=False))
    assert runs_on_host()


@pytest.mark.parametrize("mend", [*LAYOUTS, *CPU, *LOCAL_LAYERS], ids=lambda mend: mend.target)
def test_each_says_why_and_until_when(mend) -> None:
    assert mend.target.startswith("megatron.core.")
    assert mend.why
    assert mend.drop_when


def test_no_target_is_changed_twice() -> None:
    targets = [mend.target for mend in choose(has_cuda=False, has_te=False)]
    assert len(set(targets)) == len(targets)


def test_host_torch_places_cuda_tensors_on_the_host_and_leaves_torch_alone() -> None:
    import torch

    from megatron_patches.host_torch import HOST_TORCH

    assert HOST_TORCH.zeros(3, device="cuda:1").device.type == "cpu"
    assert HOST_TORCH.empty(2, device=HOST_TORCH.cuda.current_device()).device.type == "cpu"
    assert HOST_TORCH.nn is torch.nn
    assert torch.zeros is not HOST_TORCH.zeros
