"""Fault: whether a group was handed in or not, the global parallel state is asked.

With the edit the function gives back what it is given. None stays None (row-parallel layers pass it where no group is
used), so a forgotten group fails at its first use instead of becoming another model's.
"""

from megatron_patches.patch import Edit

EDIT = Edit(
    target="megatron.core.utils:get_tensor_model_parallel_group_if_none",
    source_sha="94c6616f6986",
    changes=(("if not parallel_state.is_initialized():", "if True:"),),
    why="asks parallel_state even when tp_group is given, and lets the global stand in silently when it is not",
    drop_when="the function is gone (upstream: `remove this function later`)",
)
