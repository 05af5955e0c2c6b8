"""Record and log the numbers of each step."""
