"""What TensorBoard's own tabs show: scalars, images, histograms and texts.

The GradWatch tab is in `tensorboard_plugin`.
"""
