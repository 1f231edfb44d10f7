"""`make gpu`: what is to be proven where people train, and what watching costs there."""
