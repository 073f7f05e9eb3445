"""Model families as data: names, shapes and cuts of their tensors. Knows no training or inference library."""
