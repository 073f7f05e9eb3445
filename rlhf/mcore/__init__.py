"""The only importer of Megatron-Core."""

import warnings

from megatron_patches.first_import import import_megatron

# Megatron warns at each import on each rank of what README.md says once: without Transformer Engine and Apex it runs on
# torch's own functions.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*", module=r"megatron\.core")

import_megatron()
