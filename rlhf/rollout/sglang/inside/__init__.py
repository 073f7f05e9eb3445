"""What of ours runs in the host process and in SGLang's own."""
