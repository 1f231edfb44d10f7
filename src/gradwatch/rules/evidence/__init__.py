"""What several rules ask of the history: levels, profiles over depth, paths, rates, and how numbers are worded.

Functions of the history alone; none of them opens an alert.
"""
