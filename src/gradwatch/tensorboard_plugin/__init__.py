"""The GradWatch tab in TensorBoard: a wing of its own that imports tensorboard and numpy, and neither torch nor Lightning."""
