"""What should have happened: losses and optimizers in float64, and the tolerance rule."""
