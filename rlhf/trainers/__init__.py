"""Training loops that read like their algorithm."""
