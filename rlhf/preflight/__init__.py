"""What can be known of a run before anything starts: its faults, its ranks, its bytes."""
