"""Numbers on the host, without torch: records, history, statistics, alerts, schedules, the layer graph.

Every other folder builds on this one, and it imports none of them.
"""
