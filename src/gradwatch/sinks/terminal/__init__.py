"""What a person sees in a terminal: the table at the end of a fit, alerts beside progress bars, sparklines."""
