"""What reads a user's model, loss or train step, and warns of what may differ from the full batch."""
