"""What an algorithm asks of a model, on the ranks and the layout of its role."""
