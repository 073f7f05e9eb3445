"""The only importer of Megatron-Core."""

import warnings

# Megatron warns at each import on each rank of what README.md says once: without Transformer Engine and Apex it runs on
# torch's own functions.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*", module=r"megatron\.core")
