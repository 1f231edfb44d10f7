"""The GradWatch tab in TensorBoard. It imports neither torch nor Lightning."""
