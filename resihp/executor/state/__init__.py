"""The part of the model that a rank holds: parameters and optimizer state by name, transfers between layouts,
checkpoints.

Everything uses the names of the whole model's parameters, so that any layout can take over any other's state. Imports
torch.
"""
