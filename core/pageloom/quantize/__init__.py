"""Making quantized checkpoints, with other projects' tools for finding the codes."""
