"""What is remembered about a script that does not declare a model: its entries in the journal, its checkpoints."""
