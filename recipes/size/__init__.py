"""Numbers of a training, one file a model."""
