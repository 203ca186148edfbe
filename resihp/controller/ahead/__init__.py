"""Plans made in advance: the planning process is asked during training, so that answers are ready when training
stops."""
