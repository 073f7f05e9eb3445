"""What an engine that lies on several hosts has beyond one on a single host."""
