"""What one GPU can show: blocks of figures, each in a process of its own. Run by `benchmarks.gpu`."""
