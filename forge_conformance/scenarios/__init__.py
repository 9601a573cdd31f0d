"""What the checks feed to a trainer: batches, losses, and the inputs that it takes."""
