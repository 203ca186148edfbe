"""A rank's part of the model: parameters and optimizer state by name, transfers between layouts, checkpoints.

Everything uses the names of the whole model's parameters, so that any layout can take over any other's state. Imports
torch.
"""
