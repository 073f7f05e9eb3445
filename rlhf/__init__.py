"""RLHF post-training for very large language models: Megatron-Core training, SGLang or embedded rollout, one job."""

__version__ = "0.1.0"
