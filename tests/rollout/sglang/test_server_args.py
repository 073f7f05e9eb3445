"""SGLang's arguments from the run's settings; no SGLang is needed."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.config.sglang import SGLangConfig
from rlhf.errors import ConfigError, LayoutError
from rlhf.families.registry import spec_of
from rlhf.rollout.seeds import sample_seed, uniforms
from rlhf.rollout.sglang.cpu import check_cpu_sizes, cpu_environment, idle_on_cpu
from rlhf.rollout.sglang.inside.sampling import BEGUN, STOP
from rlhf.rollout.sglang.layout import Sizes
from rlhf.rollout.sglang.server_args import Place, sampling_args, server_args
from tests.rollout.tiny import hf_model

SPEC = replace(spec_of(hf_model("qwen2").config.to_dict(), where="tiny"), ffn_size=192)


def args_of(device: str, **options: object) -> dict:
    config = RolloutConfig(engine="sglang", tp=2, kv_cache_tokens=512, sglang=SGLangConfig(**options))
    return server_args(SPEC, config, place=Place(device, 4, 1, "float32"), model_folder=Path("/x"), run_seed=2**40 + 3)


def test_no_weights_are_read_and_all_of_the_cache_is_ours():
    args = args_of("cpu")
    assert (args["load_format"], args["model_path"], args["tp_size"]) == ("dummy", "/x", 2)
    assert args["max_total_tokens"] > 512
    assert args["context_length"] > SPEC.max_positions
    assert 0 <= args["random_seed"] < 2**31
    assert args["attention_backend"] == "torch_native"
    assert args["skip_tokenizer_init"]
    assert args["sleep_on_idle"]  # or a scheduler keeps a core from the ranks while models train
    assert args_of("cpu", reply_limit_s=77.0)["watchdog_timeout"] > 1e8  # it counts time in which a job is suspended


def test_a_cache_in_pages_has_room_for_the_longest_row_of_all_tokens_that_are_ours():
    for page in (1, 16, 64, 128):
        args = args_of("cuda", extra_args=(f"page_size={page}",))
        have = args["max_total_tokens"] // page * page
        for prompt in (1, 63, 64, 65, 400, 511):
            assert have >= -(-prompt // page) * page + (512 - prompt) + page


def test_gpus_give_memory_back_and_have_graphs_and_kernels_of_their_own():
    args = args_of(
        "cuda",
        chunked_prefill_size=4096,
        schedule_policy="lpm",
        radix_cache=False,
        cuda_graph_max_batch=48,
        decode_attention_backend="fa3",
        kv_cache_dtype="fp8_e5m2",
        mem_fraction_static=0.4,
        deterministic=True,
        extra_args=("page_size=16", "enable_metrics=true"),
    )
    assert args["enable_memory_saver"]
    assert args["enable_deterministic_inference"]
    assert args["disable_radix_cache"]
    assert not args["disable_cuda_graph"]
    assert (args["base_gpu_id"], args["mem_fraction_static"], args["kv_cache_dtype"]) == (4, 0.4, "fp8_e5m2")
    assert (args["chunked_prefill_size"], args["schedule_policy"]) == (4096, "lpm")
    assert (args["cuda_graph_max_bs_decode"], args["decode_attention_backend"]) == (48, "fa3")
    assert (args["page_size"], args["enable_metrics"]) == (16, True)
    plain = args_of("cuda", cuda_graph=False)
    assert plain["disable_cuda_graph"]
    assert plain.keys().isdisjoint({"attention_backend", "chunked_prefill_size", "cuda_graph_max_bs_decode"})


def test_an_engine_on_several_hosts_is_told_which_part_is_this_ones():
    config, several = (
        RolloutConfig(engine="sglang", tp=2),
        {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:9"},
    )

    def args(**where: object) -> dict:
        place = Place("cuda", 0, 1, "bfloat16", **where)
        return server_args(SPEC, config, place=place, model_folder=Path("/x"), run_seed=1)

    assert args(num_nodes=2, node=1, meets_at="10.0.0.1:9") == args() | several
    assert args().keys().isdisjoint(several)


def test_our_sampler_takes_the_place_of_sglangs_torch_one():
    assert args_of("cpu")["sampling_backend"] == args_of("cuda")["sampling_backend"] == "pytorch"
    assert args_of("cuda", sampling_backend="flashinfer")["sampling_backend"] == "flashinfer"


def test_on_a_cpu_deterministic_asks_for_nothing_and_what_gpus_alone_have_is_refused():
    assert args_of("cpu", deterministic=True) == args_of("cpu")
    for options, message in (
        ({"attention_backend": "fa3"}, r"attention_backend: fa3 given on a CPU.*needs auto or torch_native"),
        ({"decode_attention_backend": "triton"}, "decode_attention_backend: triton given on a CPU"),
        ({"sampling_backend": "flashinfer"}, "which SGLang has on GPUs only; needs by_seed or pytorch"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "which SGLang has on GPUs only; needs auto"),
    ):
        assert args_of("cuda", **options)
        with pytest.raises(ConfigError, match=message):
            args_of("cpu", **options)


def test_what_costs_gpus_speed_or_memory_alone_is_told_on_a_cpu_where_it_was_set():
    assert idle_on_cpu(SGLangConfig(schedule_policy="lpm", cuda_graph=False)) == ""
    told = idle_on_cpu(SGLangConfig(mem_fraction_static=0.8, cuda_graph_max_batch=16, deterministic=True))
    assert told.startswith("rollout.sglang: without effect on a CPU: mem_fraction_static=0.8 (rollout.kv_cache_tokens")
    assert "cuda_graph_max_batch=16 (there are no CUDA graphs), deterministic=true (" in told
    for name in ("mem_fraction_static", "cuda_graph_max_batch", "deterministic"):  # that it is so
        value = {"mem_fraction_static": 0.8, "cuda_graph_max_batch": 16, "deterministic": True}[name]
        assert args_of("cpu", **{name: value}) == args_of("cpu")
        assert args_of("cuda", **{name: value}) != args_of("cuda")


def test_what_sglang_would_pad_or_not_run_on_a_cpu_is_refused_there():
    assert args_of("cuda", ep=2)["ep_size"] == 2
    with pytest.raises(LayoutError, match=r"rollout\.sglang\.ep: 2 given on a CPU"):
        args_of("cpu", ep=2)
    sound = replace(SPEC, ffn_size=192, num_heads=12, num_kv_heads=6)
    for spec, sizes, named in (
        (sound, Sizes(3), ""),
        (sound, Sizes(4), "4 ranks share ffn_size = 192"),
        (replace(sound, ffn_size=384), Sizes(4), "4 ranks share num_kv_heads = 6"),
        (replace(sound, num_experts=4, moe_ffn_size=64), Sizes(3), "3 ranks share moe_ffn_size = 64"),
        (replace(sound, num_experts=4, moe_ffn_size=64, ffn_size=1), Sizes(2), ""),
    ):
        with pytest.raises(LayoutError, match=named) if named else nullcontext():
            check_cpu_sizes(spec, sizes)


def test_sampling_in_sglangs_words():
    free = sampling_args(
        SamplingConfig(temperature=0.5, max_new_tokens=9, ignore_eos=True), (2,), seed=7, prompt_tokens=1
    )
    assert (free["top_k"], free["stop_token_ids"], free["ignore_eos"], free["sampling_seed"]) == (-1, [], True, 7)
    assert free["custom_params"] is None
    assert (free["temperature"], free["top_p"], free["max_new_tokens"]) == (0.5, 1.0, 9)
    ended = sampling_args(
        SamplingConfig(top_k=4, top_p=0.75, min_p=0.25, stop_token_ids=(9, 2), stop=("\n\n",)),
        (2, 5),
        seed=7,
        prompt_tokens=1,
    )
    assert (ended["top_k"], ended["min_p"], ended["stop_token_ids"], ended["ignore_eos"]) == (4, 0.25, [2, 5, 9], False)
    assert ended["top_p"] == 0.75
    assert ended["custom_params"] == {STOP: ["\n\n"], BEGUN: 0}


def test_the_most_likely_token_of_a_tempered_distribution_is_no_row_of_temperature_zero():
    """SGLang gives rows of top_k 1 log-probs of temperature 1, and dies of a top_k that is no int32."""

    def asked(**given: float) -> tuple[int, float]:
        args = sampling_args(SamplingConfig(**given), (), seed=1, prompt_tokens=1)
        return args["top_k"], args["min_p"]

    assert asked(top_k=1, temperature=0.5) == (-1, 1.0)
    assert asked(top_k=1, temperature=0.0) == (1, 0.0)
    assert asked(top_k=2, temperature=0.5, min_p=0.1) == (2, 0.1)
    assert asked(top_k=2**31) == (-1, 0.0)


def test_random_numbers_go_by_the_place_in_the_response():
    seed = sample_seed(3, 1007, 0)
    wanted = uniforms(torch.tensor(seed), torch.arange(40))
    for prompt_tokens in (1, 2, 977):
        args = sampling_args(SamplingConfig(max_new_tokens=40), (), seed=seed, prompt_tokens=prompt_tokens)
        begun = sampling_args(
            SamplingConfig(max_new_tokens=40), (), seed=seed, prompt_tokens=prompt_tokens, begun_tokens=13
        )
        assert begun["sampling_seed"] == args["sampling_seed"]
        assert (args["max_new_tokens"], begun["max_new_tokens"]) == (40, 27)
        positions = torch.arange(40) + prompt_tokens - 1  # of the last token before each one that is drawn
        assert torch.equal(uniforms(torch.tensor(args["sampling_seed"]), positions), wanted)


def test_ranks_of_engines_side_by_side_get_cores_of_their_own():
    cores = [0, 1, 2, 3, 8, 9, 10, 11]
    first = cpu_environment(2, leader=0, threads=2, cores=cores)["SGLANG_CPU_OMP_THREADS_BIND"]
    second = cpu_environment(2, leader=2, threads=2, cores=cores)["SGLANG_CPU_OMP_THREADS_BIND"]
    assert (first, second) == ("0,1|2,3", "8,9|10,11")
