"""Packaging of rlhf. Exact versions stand in constraints.txt; install with `pip install -c constraints.txt -e .`."""

from setuptools import find_packages, setup

import rlhf

CORE = [
    "torch",
    "numpy",
    "megatron-core",
    "einops",
    "psutil",
    "packaging",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "safetensors",
    "sentencepiece",
    "jinja2",
    "omegaconf",
    "pyyaml",
    "pyarrow",
    "reasoning-gym",
    "math-verify",
    "rich",
    "matplotlib",
    "tensorboard",
    "wandb",
]
SGLANG_CPU = [
    "aiohttp",
    "apache-tvm-ffi",
    "compressed-tensors",
    "dill",
    "distro",
    "fastapi",
    "gguf",
    "ipython",
    "mistral-common",
    "msgspec",
    "nvidia-ml-py",
    "openai",
    "orjson",
    "partial-json-parser",
    "pillow",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "regex",
    "requests",
    "scipy",
    "setproctitle",
    "tiktoken",
    "tqdm",
    "triton",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "zstandard",
]
"""What SGLang imports on a CPU; scripts/setup.sh installs it without its own requirements, most of which need a GPU."""
TEST = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
DEV = ["ruff", "mypy"]

setup(
    name="rlhf",
    version=rlhf.__version__,
    description=rlhf.__doc__,
    python_requires=">=3.11",
    packages=find_packages(include=["rlhf", "rlhf.*", "megatron_patches", "megatron_patches.*"]),
    entry_points={"console_scripts": ["rlhf-convert = rlhf.checkpoint.convert.command:console"]},
    install_requires=CORE,
    extras_require={
        "gpu": ["transformer-engine[core_cu13,pytorch]", "flash-attn"],
        "sglang": ["sglang"],
        "sglang-cpu": SGLANG_CPU,
        "test": TEST,
        "dev": TEST + DEV,
    },
)
