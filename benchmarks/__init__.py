"""Scripts that print the figures of the README, each with its yardstick in the same run."""
