"""A rank's part of the model: parameters and optimizer state by name, transfers between layouts, checkpoints.

All modules use the parameter names of the whole model, so that state can be moved between any two layouts. Imports
torch.
"""
