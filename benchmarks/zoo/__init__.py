"""The fault zoo: trainings with a known fault and healthy ones, and who notices which: `python -m benchmarks.zoo`."""
