"""Tensors to numbers on the device: gradients at the step, weights, and modules on sampled steps.

In an ordinary step, `device_buffer` alone brings numbers to the host. `rules` decides whether a number is good or bad.

Four kinds of index. A site index is a position in `Layout.sites`. A place is a position among all watched parameters,
`GradientReader.parameters`, and a member one among those of an optimizer, `OptimizerParameters.parameters`, whose
`indices` are their places. A slot is a position in a row of the buffer: `Plan.positions` has the member of each.
"""
