"""One model through one training: each step is measured, recorded, judged and sent to the sinks.

Does not import Lightning: the callback and the plain loop both drive `Engine`.
"""
