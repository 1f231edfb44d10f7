"""Public reports of broken trainings, rebuilt small with their fixes: `python -m benchmarks.reports`."""
