"""The GradWatch tab in TensorBoard: a wing of its own, which imports neither torch nor Lightning."""
