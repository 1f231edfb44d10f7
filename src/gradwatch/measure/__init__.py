"""Tensors to numbers on the device: gradients at the step, weights, and modules on sampled steps.

`device_buffer` is the one file that brings numbers to the host. Whether a number is good or bad is decided in `rules`.

Four kinds of index. A site index is a position in `Layout.sites`. A place is a position among all watched parameters,
`GradientReader.parameters`, and a member one among those of an optimizer, `OptimizerParameters.parameters`, whose
`indices` are their places. A slot is a position in a row of the buffer: `Plan.positions` has the member of each.
"""
