"""What made the first value that is not finite: a run on a copy of the model, looked at call by call, and back."""
