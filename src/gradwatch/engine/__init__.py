"""One model through one training: each step is measured, recorded, judged and sent to the sinks.

Knows no Lightning: the callback and the plain loop both drive `Engine`.
"""
