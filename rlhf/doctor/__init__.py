"""What may be wrong with the machines under a job, found before it costs one."""
