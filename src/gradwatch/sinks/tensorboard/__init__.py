"""The sink for TensorBoard's own tabs: scalars, images, histograms and texts.

The GradWatch tab is in `tensorboard_plugin`.
"""
