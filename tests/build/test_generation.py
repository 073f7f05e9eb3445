"""Answers from a model folder, outside training: against transformers, on both engines, from every kind of folder."""

import json
import os
import re
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import transformers

from rlhf.build.generation import Answer, GenerationEngine, SamplingConfig, open_engine
from rlhf.checkpoint.convert.command import main as convert
from rlhf.data.tokenizer import tiny_tokenizer
from rlhf.errors import CheckpointError, ConfigError, DataError, EngineError, EngineLostError
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.sglang.engine import SGLangEngine
from tests.harness.ranks import run_ranks
from tests.rollout.sglang.tiny import needs_sglang
from tests.rollout.test_native_engine import greedy_reference
from tests.rollout.tiny import hf_model, reference_logprobs

REPO = Path(__file__).resolve().parents[2]
SHAPE = {"vocab_size": 300, "intermediate_size": 64, "max_position_embeddings": 120}
"""MLPs that give each of two ranks a multiple of 32, as SGLang wants; a word for each token of the tokenizer."""
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=9)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def write_folder(folder: Path, *, seed: int) -> transformers.PreTrainedModel:
    model = hf_model("qwen3", **SHAPE)
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, 17]}))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    return write_folder(folder, seed=1)


@pytest.fixture(scope="module", params=["native", pytest.param("sglang", marks=needs_sglang)])
def engine(request: pytest.FixtureRequest, folder: Path, model: object) -> Iterator[GenerationEngine]:
    """SGLang's has two tp ranks, and both are this process's."""
    torch.set_num_threads(1)
    tp = 2 if request.param == "sglang" else 1
    with open_engine(folder, engine=request.param, tp=tp, max_running=8, kv_cache_tokens=1024) as opened:
        yield opened


def check(model: transformers.PreTrainedModel, prompt: list[int], answer: Answer) -> None:
    wanted = greedy_reference(model, torch.tensor(prompt), GREEDY.max_new_tokens, eos=17).tolist()
    assert list(answer.tokens) == wanted
    assert answer.finish_reason == ("stop" if wanted[-1] == 17 else "length")
    logprobs = reference_logprobs(model, torch.tensor(prompt), torch.tensor(wanted))
    # fp32 sums in another order, over two ranks
    torch.testing.assert_close(torch.tensor(answer.logprobs), logprobs, atol=3e-5, rtol=0)


def test_texts_chats_and_tokens_are_answered_as_transformers_does(engine, model, folder) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["one and one", "z"]
    answers = engine.generate([*texts, [5, 6, 7]], GREEDY)
    assert [answer.prompt for answer in answers] == [0, 1, 2]
    for prompt, answer in zip([*(tokenizer(text).input_ids for text in texts), [5, 6, 7]], answers, strict=True):
        check(model, prompt, answer)
        assert answer.text == tokenizer.decode(answer.tokens, skip_special_tokens=True)
    (chat,) = engine.generate(["hello"], GREEDY, chat=True)
    check(model, tokenizer("<user>hello<assistant>").input_ids, chat)


def test_n_answers_are_samples_of_their_own_and_so_are_those_of_the_next_call(engine) -> None:
    sampling = SamplingConfig(max_new_tokens=12, ignore_eos=True)
    answers = engine.generate([[1, 2, 3], [4]], sampling, n=6)
    assert [answer.prompt for answer in answers] == [0] * 6 + [1] * 6
    more = engine.generate([[1, 2, 3]], sampling, n=6)
    assert len({answer.tokens for answer in answers[:6] + more}) == 12
    assert {len(answer.tokens) for answer in answers} == {12}
    assert engine.generate([], sampling) == []


def test_a_stop_string_ends_an_answer(engine, model) -> None:
    (free,) = engine.generate([[9, 8]], SamplingConfig(temperature=0.0, max_new_tokens=9, ignore_eos=True))
    letter = next(char for char in free.text if char.isascii() and char.isprintable())
    (answer,) = engine.generate([[9, 8]], SamplingConfig(temperature=0.0, max_new_tokens=9, stop=(letter,)))
    assert answer.finish_reason == "stop"
    assert free.text.startswith(answer.text[:-1])
    assert answer.text.endswith(letter) or 17 in answer.tokens


def test_the_monitor_has_seen_the_rows_since_it_was_started(engine) -> None:
    engine.performance.start()
    engine.generate([list(range(20, 80))], SamplingConfig(max_new_tokens=6, ignore_eos=True), n=10)
    found = engine.performance.stats()
    assert found.rows == 10
    assert 0 < found.first_token_p50_s <= found.latency_p50_s <= found.latency_p95_s <= found.seconds
    assert found.queue_p95_s > 0  # 8 run at a time
    assert found.queue_max >= 2
    assert found.decode_tokens_per_s > 0
    assert 0 < found.utilisation <= 1
    assert found.cache_hits > 0.1


def test_other_weights_of_the_same_model_are_loaded_into_the_open_engine(engine, model, folder, tmp_path) -> None:
    other = write_folder(tmp_path / "other", seed=2)
    before = engine.generate([[5, 6, 7]], GREEDY)[0]
    engine.load(tmp_path / "other")
    (answer,) = engine.generate([[5, 6, 7]], GREEDY)
    check(other, [5, 6, 7], answer)
    assert answer.tokens != before.tokens
    engine.load(folder)
    assert engine.generate([[5, 6, 7]], GREEDY)[0].tokens == before.tokens


def test_a_second_folder_brings_its_own_template_and_end_tokens_into_the_same_engine(
    engine, model, folder, tmp_path
) -> None:
    second, running = tmp_path / "second", engine._engine._running[0]
    shutil.copytree(folder, second)
    (free,) = engine.generate([[9, 8]], SamplingConfig(temperature=0.0, max_new_tokens=9, ignore_eos=True))
    last = next(token for token in free.tokens if token != 17)
    (second / "generation_config.json").write_text(json.dumps({"eos_token_id": last}))
    (second / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    engine.load(second)
    (answer,) = engine.generate([[9, 8]], GREEDY)
    assert answer.tokens == free.tokens[: free.tokens.index(last) + 1]
    assert answer.finish_reason == "stop"
    (chat,) = engine.generate(["hello"], GREEDY, chat=True)
    assert chat.tokens == engine.generate(["hello!"], GREEDY)[0].tokens
    engine.load(folder)
    assert engine._engine._running == [running]
    check(model, [5, 6, 7], engine.generate([[5, 6, 7]], GREEDY)[0])


def test_after_a_load_that_fails_half_way_nothing_is_answered_until_the_next(engine, model, folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    before = engine.generate([[5, 6, 7]], GREEDY)[0]
    cut = tmp_path / "cut" / "model.safetensors"
    reader = engine._engine._read

    def cuts_the_file(tensor, box):
        if "layers.1.mlp" in tensor:
            cut.write_bytes(whole[: len(whole) // 2])
        return reader(tensor, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._engine, "_read", cuts_the_file)
        with pytest.raises(CheckpointError, match="fetch it again"):
            engine.load(tmp_path / "cut")
    with pytest.raises(EngineError, match="the last load has failed half-way"):
        engine.generate([[5, 6, 7]], GREEDY)
    engine.load(folder)
    assert engine.generate([[5, 6, 7]], GREEDY)[0].tokens == before.tokens


def test_prompts_that_cannot_be_answered_are_named(engine) -> None:
    for prompts, options, message in (
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 112], {}, r"prompt 0 has 112 tokens and may get max_new_tokens = 9 more; needs at most 120 together"),
        ("text", {}, "needs a list of prompts"),
        ([1, 2], {}, "prompt 0 is 1; needs a text or a list of token ids"),
        ([[1], [1.5, 2.0]], {}, r"prompt 1 is \[1\.5, 2\.0\]; needs a text or"),
        ([[1], None], {}, "prompt 1 is None; needs a text or"),
        ([[1], b"12"], {}, "prompt 1 is b'12'; needs a text or"),
        ([[1], [2, 300]], {}, r"prompt 1 has token 300; the model has 0\.\.299"),
        ([[-1]], {}, "prompt 0 has token -1"),
        ([[2**70]], {}, "prompt 0 has token 1180591620717411303424"),
        ([[1]], {"n": 0}, "n = 0; needs a whole number of at least 1"),
        ([[1]], {"n": 2.5}, r"n = 2\.5; needs a whole number"),
        (
            [[1]],
            {"sampling": SamplingConfig(stop_token_ids=(300,))},
            r"stop_token_ids = \[300\]; the model has 0\.\.299",
        ),
    ):
        with pytest.raises(DataError, match=message):
            engine.generate(prompts, **{"sampling": GREEDY, **options})
    with pytest.raises(ConfigError, match=r"sampling = \{'temperature': 0\}; needs a SamplingConfig"):
        engine.generate([[1]], {"temperature": 0})
    with pytest.raises(ConfigError, match=r"sampling\.stop: the text 'ab' given; needs a list of strings"):
        SamplingConfig(stop="ab")
    assert len(engine.generate([[1] * 111], GREEDY)[0].tokens) >= 1


def test_an_interrupted_call_leaves_an_engine_that_answers(engine, model) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1]], SamplingConfig(max_new_tokens=100, ignore_eos=True), n=200)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    check(model, [5, 6, 7], engine.generate([[5, 6, 7]], GREEDY)[0])


def test_for_another_model_with_another_tokenizer_the_engine_starts_anew_also_when_it_was_lost(
    engine, model, tmp_path
) -> None:
    """The last with this engine, which has another model afterwards."""
    other = hf_model("llama", **SHAPE | {"num_hidden_layers": 1})
    other.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer(tmp_path, ["one and two and three"] * 9, vocab_size=290)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 17}))
    running = engine._engine._running[0]
    if isinstance(running, SGLangEngine):
        os.kill(psutil.Process(running.host_pid).children()[-1].pid, signal.SIGKILL)
        sampling = SamplingConfig(max_new_tokens=100, ignore_eos=True)
        with pytest.raises(EngineLostError, match="was ended by SIGKILL"):
            engine.generate([[5, 6, 7]], sampling, n=2000)  # it is looked at twice a second
        with pytest.raises(EngineError, match="the engine was lost; needs a new start; load a folder"):
            engine.generate([[5, 6, 7]], GREEDY)
    engine.load(tmp_path)
    assert engine._engine._running != [running]
    prompt = tokenizer("one and two").input_ids
    (answer,) = engine.generate(["one and two"], GREEDY)
    check(other, prompt, answer)
    assert answer.text == tokenizer.decode(answer.tokens, skip_special_tokens=True)
    letters = set(string.ascii_lowercase)
    answers = engine.generate([prompt], SamplingConfig(max_new_tokens=60, stop=tuple(sorted(letters))), n=8)
    stopped = [one for one in answers if letters & set(tokenizer.decode(one.tokens[-1:]))]
    assert len(stopped) >= 4
    assert {one.finish_reason for one in stopped} == {"stop"}
    assert not any(letters & set(tokenizer.decode(one.tokens[:-1])) for one in answers)


class Counted(NativeEngine):
    """Says when it is closed."""

    def close(self) -> None:
        print("closed", flush=True)
        super().close()


@pytest.mark.parametrize("forgotten", ["del engine; gc.collect(); print('later')", "print('later')"])
def test_an_engine_that_nobody_closes_is_closed_when_it_is_forgotten_or_python_ends(folder, model, forgotten) -> None:
    script = f"""
import gc
from rlhf.build.generation import open_engine
engine = open_engine({str(folder)!r}, engine="tests.build.test_generation:Counted")
{forgotten}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == (["closed", "later"] if "del" in forgotten else ["later", "closed"])


def test_converted_and_bare_folders_answer_like_the_original(folder, model, tmp_path) -> None:
    torch.set_num_threads(1)
    assert convert(["to-megatron", str(folder), str(tmp_path / "megatron"), "--tp", "2"]) == 0
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, bare)
    for path, text in ((tmp_path / "megatron", "one"), (bare, "")):
        with open_engine(path) as opened:
            (answer,) = opened.generate([[5, 6, 7]], GREEDY)
            check(model, [5, 6, 7], answer) if text else check_ignoring_ends(model, answer)
            if text:
                assert len(opened.generate([text], GREEDY)) == 1
            else:
                assert answer.text == ""
                with pytest.raises(DataError, match="prompt 0 is a text, but there is no tokenizer"):
                    opened.generate(["one"], GREEDY)
    with pytest.raises(EngineError, match="generate: the engine is closed"):
        opened.generate([[1]], GREEDY)
    with pytest.raises(EngineError, match="load: the engine is closed"):
        opened.load(folder)
    assert "closed" in repr(opened)


def check_ignoring_ends(model: transformers.PreTrainedModel, answer: Answer) -> None:
    """Nothing says which token ends a response of the bare folder."""
    assert list(answer.tokens) == greedy_reference(model, torch.tensor([5, 6, 7]), GREEDY.max_new_tokens).tolist()


def test_what_cannot_be_opened_is_named_before_anything_starts(folder, model, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "odd").mkdir()
    shutil.copy(folder / "model.safetensors", tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"model_type": "mamba", "architectures": ["M"]}))
    for path, options, error, message in (
        ("no/such/folder", {}, CheckpointError, "neither a folder nor a hub id"),
        (tmp_path / "empty", {}, CheckpointError, "config.json"),
        (tmp_path / "odd", {}, (CheckpointError, ConfigError), "architecture M; needs one of"),
        (folder, {"engine": "vllm"}, ConfigError, "needs native, sglang or package.module:factory"),
        (folder, {"engine": "no_module:Engine"}, ConfigError, "cannot be loaded"),
        (folder, {"dtype": "int8"}, ConfigError, "needs one of float32, bfloat16, float16"),
        (folder, {"device": "tpux"}, ConfigError, "needs cpu, cuda or cuda:N"),
        (folder, {"tp": 2}, ConfigError, r"torchrun --nproc-per-node 2.*or take engine=\"sglang\""),
        (folder, {"kv_cache_tokens": 0}, ConfigError, "kv_cache_tokens"),
    ):
        with pytest.raises(error, match=message):
            open_engine(path, **options)


@pytest.mark.dist
def test_ranks_share_a_native_engine_and_rank_0_gets_the_answers(folder, model) -> None:
    wanted = greedy_reference(model, torch.tensor([5, 6, 7]), GREEDY.max_new_tokens, eos=17).tolist()
    run_ranks(2, answers_of_ranks, str(folder), wanted)


def answers_of_ranks(folder: str, wanted: list[int]) -> None:
    with open_engine(folder, tp=2) as opened:
        answers = opened.generate([[5, 6, 7]], GREEDY)
        assert [list(answer.tokens) for answer in answers] == ([wanted] if dist.get_rank() == 0 else [])
    with pytest.raises(ConfigError, match=r"tp = 4, but torch\.distributed has 2 ranks"):
        open_engine(folder, tp=4)


def test_the_example_of_the_readme_runs_as_it_is_written(folder, model, tmp_path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPO / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (example,) = (block for block in blocks if "open_engine" in block)
    assert "MODEL_FOLDER" in example
    assert len([line for line in example.splitlines() if line.strip()]) <= 5
    script = tmp_path / "example.py"
    script.write_text(example.replace("MODEL_FOLDER", str(folder)))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4  # two answers to each of two prompts; one may have several lines
    assert "megatron" not in done.stderr.lower()
