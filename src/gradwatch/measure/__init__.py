"""Tensors to numbers on the device: gradients at the step, weights, and modules on sampled steps.

`device_buffer` is the one file that brings numbers to the host. Whether a number is good or bad is decided in `rules`.
"""
