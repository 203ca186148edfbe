"""Plans made before they are needed: questions asked during training, with answers that are ready when it stops."""
