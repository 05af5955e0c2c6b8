"""What is recorded and logged of each step."""
