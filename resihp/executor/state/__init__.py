"""What a rank holds of the model: parameters and optimizer state by name, their moves between layouts, checkpoints.

All by the names of the whole model's parameters, so that any layout can go on from any other's state. Imports torch.
"""
