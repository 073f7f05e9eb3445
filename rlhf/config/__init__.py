"""Settings of a run as frozen dataclasses. Knows no torch, no process group and no file but the config's own."""
