"""The processes of an engine: begun, watched, ended."""
