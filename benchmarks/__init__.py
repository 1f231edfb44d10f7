"""What watching costs, and how true its numbers are: `python -m benchmarks` from the root of the repository."""
