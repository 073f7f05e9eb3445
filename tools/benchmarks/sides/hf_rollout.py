"""Side `transformers`: `generate` with its dynamic cache. `... hf_rollout MODEL_FOLDER THREADS`; no more than torch."""

import sys
from collections.abc import Mapping
from typing import Any

from tools.benchmarks.measure import timed
from tools.benchmarks.side import Handler, serve


def start() -> tuple[Handler, Mapping[str, str]]:
    """Load the model."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own
    import transformers  # noqa: PLC0415

    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # nothing ends early, and no processor has to forbid it

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(request["prompts"])
        sampling = {"do_sample": False} if request["greedy"] else {"do_sample": True, "temperature": 1.0}
        found: list[torch.Tensor] = []

        def generate() -> None:
            with torch.inference_mode():
                found.append(
                    model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=request["new_tokens"],
                        pad_token_id=0,
                        top_k=None if request["greedy"] else 0,
                        top_p=None if request["greedy"] else 1.0,
                        **sampling,
                    )
                )

        seconds = timed(generate)
        return {"seconds": seconds, "responses": found[0][:, ids.shape[1] :].tolist()}

    return handle, {"transformers": transformers.__version__, "torch of transformers": torch.__version__}


if __name__ == "__main__":
    serve(start)
