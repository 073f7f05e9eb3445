"""The only importer of Megatron-Core."""
