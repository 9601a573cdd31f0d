"""Looking at a trainer from outside: its parameters, its gradients, its autograd graph."""
