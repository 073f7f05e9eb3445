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
TEST = ["pytest", "pytest-timeout", "hypothesis"]
DEV = ["ruff", "mypy"]

setup(
    name="rlhf",
    version=rlhf.__version__,
    description=rlhf.__doc__,
    python_requires=">=3.11",
    packages=find_packages(include=["rlhf", "rlhf.*", "megatron_patches", "megatron_patches.*"]),
    install_requires=CORE,
    extras_require={
        "gpu": ["transformer-engine[core_cu13,pytorch]", "flash-attn"],
        "sglang": ["sglang"],
        "test": TEST,
        "dev": TEST + DEV,
    },
)
