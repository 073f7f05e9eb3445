"""One module a side: the programs that are measured, ours and peers, each in a process of its own."""
