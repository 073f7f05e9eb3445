"""Places that reach for the global parallel state or for the whole world, where several layouts share a job."""
